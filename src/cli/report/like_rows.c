/* cli/report/like_rows.c: see like_rows.h. */
#include "cli/report/like_rows.h"

#include <stdlib.h>
#include <string.h>

#include "cli/cli_memory.h"
#include "cli/report/inventory.h"

struct member {
    char *pattern;
    const char *detail;
    size_t index;
};

static int compare_kinds(const struct member *a, const struct member *b) {
    const int order = strcmp(a->pattern, b->pattern);
    return order != 0 ? order : strcmp(a->detail, b->detail);
}

static int compare_members(const void *first, const void *second) {
    const struct member *const a = first;
    const struct member *const b = second;
    const int order = compare_kinds(a, b);
    return order != 0 ? order : (a->index > b->index) - (a->index < b->index);
}

static int compare_rows(const void *first, const void *second) {
    const struct like_row *const a = first;
    const struct like_row *const b = second;
    return (a->first > b->first) - (a->first < b->first);
}

/* Sorts the members, so that those of a row are neighbours, and merges these. */
static void merge(struct member *members, size_t count, const struct like_item *items, struct like_rows *made) {
    size_t *const first_of =
        alloc_array(count, sizeof *first_of); /* index of the first member of an item's row */
    qsort(members, count, sizeof *members, compare_members);
    for (size_t i = 0; i < count; ++i) {
        if (i != 0 && compare_kinds(&members[i - 1], &members[i]) == 0) {
            ++made->rows[made->count - 1].count;
        } else {
            made->rows[made->count++] = (struct like_row){NULL, members[i].index, 1};
        }
        first_of[members[i].index] = made->rows[made->count - 1].first;
    }
    qsort(made->rows, made->count, sizeof *made->rows, compare_rows);
    for (size_t row = 0; row < made->count; ++row) {
        const char *const name = items[made->rows[row].first].name;
        made->row_of[made->rows[row].first] = row;
        made->rows[row].name = made->rows[row].count == 1 ? copy_text(name, strlen(name)) : like_pattern(name);
    }
    for (size_t i = 0; i < count; ++i) {
        made->row_of[i] = made->row_of[first_of[i]];
    }
    free(first_of);
}

struct like_rows like_rows_make(const struct like_item *items, size_t count, bool is_grouped) {
    struct like_rows made = {alloc_array(count, sizeof *made.rows), 0, alloc_array(count, sizeof *made.row_of)};
    struct member *const members = alloc_array(count, sizeof *members);
    for (size_t i = 0; i < count; ++i) {
        if (is_grouped) {
            members[i] = (struct member){like_pattern(items[i].name), items[i].detail, i};
        } else {
            made.rows[made.count++] = (struct like_row){copy_text(items[i].name, strlen(items[i].name)), i, 1};
            made.row_of[i] = i;
        }
    }
    if (is_grouped && count != 0) {
        merge(members, count, items, &made);
    }
    for (size_t i = 0; i < count; ++i) {
        free(members[i].pattern);
    }
    free(members);
    return made;
}

void like_rows_free(struct like_rows *rows) {
    for (size_t i = 0; i < rows->count; ++i) {
        free(rows->rows[i].name);
    }
    free(rows->rows);
    free(rows->row_of);
    *rows = (struct like_rows){0};
}
