/* cli/console/report_table.h: a table of texts with aligned columns. */
#ifndef OPAQ_CLI_CONSOLE_REPORT_TABLE_H
#define OPAQ_CLI_CONSOLE_REPORT_TABLE_H

#include <stdio.h>

struct report_table;

/* `headings` are separated by '|', and a letter of `alignment` says of each column whether it is aligned to the left or
 * to the right: "name|bytes" and "lr". */
struct report_table *table_begin(const char *headings, const char *alignment);

/* The next cell, row by row. */
void table_cell(struct report_table *table, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Prints the table, indented, if it has any row, and releases it. */
void table_end(struct report_table *table, FILE *file);

#endif
