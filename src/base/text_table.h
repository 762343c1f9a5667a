/* base/text_table.h: values found by their text, without a lock. Depends on nothing.
 *
 * A fixed array of buckets, each a list that only grows at its head. A reader walks the list with acquire loads and
 * takes no lock. A writer holds fork_lock, looks again, and publishes a finished entry with one release store. Entries
 * are never freed: their number is limited by the user, and callers keep the pointers. */
#ifndef OPAQ_BASE_TEXT_TABLE_H
#define OPAQ_BASE_TEXT_TABLE_H

#include <stdatomic.h>
#include <stddef.h>

enum { TEXT_TABLE_BUCKETS = 1024 };

struct text_entry;

/* All zero at first. */
struct text_table {
    _Atomic(struct text_entry *) bucket[TEXT_TABLE_BUCKETS];
    int count; /* guarded by fork_lock */
};

/* The value under a text, or NULL. */
const void *text_table_find(struct text_table *table, const char *text, size_t length);

/* With fork_lock held, for a text that is not there: keeps a copy of the value's bytes under it, or, if `bytes` is 0,
 * the pointer itself. NULL if there is no memory. */
const void *text_table_insert(struct text_table *table, const char *text, size_t length, const void *value,
                              size_t bytes);

#endif
