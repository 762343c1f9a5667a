/* cli/report/like_rows.h: groups of items whose names differ in numbers only, as `opaq inspect` shows
 * weights. */
#ifndef OPAQ_CLI_REPORT_LIKE_ROWS_H
#define OPAQ_CLI_REPORT_LIKE_ROWS_H

#include <stdbool.h>
#include <stddef.h>

/* What is grouped: a name, and a text that must be equal within a group. Both belong to the caller. */
struct like_item {
    const char *name;
    const char *detail;
};

struct like_row {
    char *name;   /* "model.layers.*.mlp.up_proj.weight", or the name of the only member */
    size_t first; /* index of the first member */
    size_t count;
};

struct like_rows {
    struct like_row *rows; /* in the order of their first members */
    size_t count;
    size_t *row_of; /* for each item the index of its row */
};

/* Without `is_grouped` every item is a separate row. */
struct like_rows like_rows_make(const struct like_item *items, size_t count, bool is_grouped);
void like_rows_free(struct like_rows *rows);

#endif
