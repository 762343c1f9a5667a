/* cli/console/report_table.c: see report_table.h. */
#include "cli/console/report_table.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli_memory.h"
#include "cli/console/terminal.h"

struct report_table {
    const char *alignment;
    size_t columns;
    char **cells; /* the headings first */
    size_t count;
    size_t capacity;
};

static void add_cell(struct report_table *table, char *cell) {
    table->cells = grow_array(table->cells, table->count, &table->capacity, sizeof *table->cells);
    table->cells[table->count++] = cell;
}

struct report_table *table_begin(const char *headings, const char *alignment) {
    struct report_table *const table = alloc_array(1, sizeof *table);
    table->alignment = alignment;
    table->columns = strlen(alignment);
    for (size_t i = 0; i < table->columns; ++i) {
        const size_t length = strcspn(headings, "|");
        add_cell(table, copy_text(headings, length));
        headings += length + (headings[length] == '|');
    }
    return table;
}

void table_cell(struct report_table *table, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const int length = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    const size_t bytes = length < 0 ? 1 : (size_t)length + 1;
    char *const cell = alloc_array(bytes, 1);
    va_start(arguments, format);
    vsnprintf(cell, bytes, format, arguments);
    va_end(arguments);
    add_cell(table, cell);
}

/* Number of characters. */
static size_t text_width(const char *text) {
    size_t width = 0;
    for (size_t bytes = 0; *text != '\0'; text += bytes) {
        (void)shown_length(text, &bytes);
        ++width;
    }
    return width;
}

static void print_row(const struct report_table *table, size_t first, const size_t *widths, FILE *file) {
    for (size_t i = 0; i < table->columns; ++i) {
        const char *const cell = table->cells[first + i];
        const int padding = (int)(widths[i] - text_width(cell));
        const int is_left = table->alignment[i] == 'l';
        const int is_last = i + 1 == table->columns;
        fprintf(file, "  %*s", is_left ? 0 : padding, "");
        show_text(file, cell);
        fprintf(file, "%*s", is_left && !is_last ? padding : 0, "");
    }
    fputc('\n', file);
}

void table_end(struct report_table *table, FILE *file) {
    size_t *const widths = alloc_array(table->columns, sizeof *widths);
    for (size_t i = 0; i < table->count; ++i) {
        const size_t width = text_width(table->cells[i]);
        if (widths[i % table->columns] < width) {
            widths[i % table->columns] = width;
        }
    }
    for (size_t i = 0; i < table->count && table->count > table->columns; i += table->columns) {
        print_row(table, i, widths, file);
    }
    for (size_t i = 0; i < table->count; ++i) {
        free(table->cells[i]);
    }
    free(table->cells);
    free(widths);
    free(table);
}
