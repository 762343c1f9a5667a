/* base/text_table.c: lock-free lookup of values by text. */
#include "base/text_table.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct text_entry {
    struct text_entry *next; /* set before the entry is published */
    const void *value;
    size_t length;
    const char *text;
    _Alignas(8) unsigned char memory[]; /* the value, if it is stored here, then the text */
};

static _Atomic(struct text_entry *) *bucket_of(struct text_table *table, const char *text, size_t length) {
    uint32_t hash = 2166136261u; /* FNV-1a */
    for (size_t i = 0; i < length; ++i) {
        hash = (hash ^ (unsigned char)text[i]) * 16777619u;
    }
    return &table->bucket[(hash ^ hash >> 16) % TEXT_TABLE_BUCKETS];
}

const void *text_table_find(struct text_table *table, const char *text, size_t length) {
    const struct text_entry *entry = atomic_load_explicit(bucket_of(table, text, length), memory_order_acquire);
    for (; entry != NULL; entry = entry->next) {
        if (entry->length == length && memcmp(entry->text, text, length) == 0) {
            return entry->value;
        }
    }
    return NULL;
}

const void *text_table_insert(struct text_table *table, const char *text, size_t length, const void *value,
                              size_t bytes) {
    struct text_entry *entry = malloc(sizeof *entry + bytes + length);
    if (entry == NULL) {
        return NULL;
    }
    _Atomic(struct text_entry *) *bucket = bucket_of(table, text, length);
    if (bytes > 0) {
        memcpy(entry->memory, value, bytes);
    }
    memcpy(entry->memory + bytes, text, length);
    entry->value = bytes > 0 ? entry->memory : value;
    entry->text = (const char *)entry->memory + bytes;
    entry->length = length;
    entry->next = atomic_load_explicit(bucket, memory_order_relaxed);
    atomic_store_explicit(bucket, entry, memory_order_release);
    ++table->count;
    return entry->value;
}
