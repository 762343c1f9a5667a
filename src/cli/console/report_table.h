/* cli/console/report_table.h: a table of texts with aligned columns. */
#ifndef OPAQ_CLI_CONSOLE_REPORT_TABLE_H
#define OPAQ_CLI_CONSOLE_REPORT_TABLE_H

#include <stdio.h>

struct report_table;

/* `headings` are separated by '|', and `alignment` has a letter for each column, l for left and r for right:
 * "name|bytes" and "lr". */
struct report_table *table_begin(const char *headings, const char *alignment);

/* The next cell, row by row. */
void table_cell(struct report_table *table, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Prints the table, indented, if it has rows, and releases it. */
void table_end(struct report_table *table, FILE *file);

#endif
