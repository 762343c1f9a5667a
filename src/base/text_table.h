/* base/text_table.h: lock-free lookup of values by text. Depends on nothing.
 *
 * A fixed array of buckets, each a list that only grows at its head. A reader walks the list with acquire loads
 * and takes no lock. A writer holds fork_lock, searches again, and publishes a finished entry with one release
 * store. Entries are never freed: callers keep the pointers, and the user of the table limits their number. */
#ifndef OPAQ_BASE_TEXT_TABLE_H
#define OPAQ_BASE_TEXT_TABLE_H

#include <stdatomic.h>
#include <stddef.h>

enum { TEXT_TABLE_BUCKETS = 1024 };

struct text_entry;

/* Initialize to zero. */
struct text_table {
    _Atomic(struct text_entry *) bucket[TEXT_TABLE_BUCKETS];
    int count; /* guarded by fork_lock */
};

/* The value of a text, or NULL. */
const void *text_table_find(struct text_table *table, const char *text, size_t length);

/* Adds a text that is not in the table; fork_lock must be held. Stores a copy of the value's bytes or, if
 * `bytes` is 0, the pointer itself. NULL if an allocation failed. */
const void *text_table_insert(struct text_table *table, const char *text, size_t length, const void *value,
                              size_t bytes);

#endif
