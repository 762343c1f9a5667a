/* format/spec_intern.c: one shared copy per spec value.
 *
 * A fixed array of buckets, each a list that only grows at its head. A reader walks the list with acquire
 * loads and takes no lock. A writer holds the mutex, looks again, and publishes a finished entry with one
 * release store. Entries are never freed: their number is limited, and callers keep the pointers. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "opaq/spec.h"
#include "opaq/status.h"

enum { BUCKETS = 1024 };

struct entry {
    struct entry *next;           /* set before the entry is published */
    const struct opaq_spec *spec; /* the canonical text's entry owns the value, others point to it */
    struct opaq_spec value;
    size_t length;
    char text[];
};

static _Atomic(struct entry *) buckets[BUCKETS];
static pthread_mutex_t write_mutex = PTHREAD_MUTEX_INITIALIZER;
static int entry_count; /* guarded by write_mutex */

static unsigned bucket_of(const char *text, size_t length) {
    uint32_t hash = 2166136261u; /* FNV-1a */
    for (size_t i = 0; i < length; ++i) {
        hash = (hash ^ (unsigned char)text[i]) * 16777619u;
    }
    return (hash ^ hash >> 16) % BUCKETS;
}

static const struct opaq_spec *find(const char *text, size_t length) {
    const struct entry *entry = atomic_load_explicit(&buckets[bucket_of(text, length)], memory_order_acquire);
    for (; entry != NULL; entry = entry->next) {
        if (entry->length == length && memcmp(entry->text, text, length) == 0) {
            return entry->spec;
        }
    }
    return NULL;
}

/* With the mutex held. `shared` NULL: the entry owns `value`. NULL if there is no memory. */
static const struct opaq_spec *insert(const char *text, size_t length, const struct opaq_spec *value,
                                      const struct opaq_spec *shared) {
    struct entry *entry = malloc(sizeof *entry + length);
    if (entry == NULL) {
        return NULL;
    }
    _Atomic(struct entry *) *bucket = &buckets[bucket_of(text, length)];
    entry->value = *value;
    entry->spec = shared == NULL ? &entry->value : shared;
    entry->length = length;
    memcpy(entry->text, text, length);
    entry->next = atomic_load_explicit(bucket, memory_order_relaxed);
    atomic_store_explicit(bucket, entry, memory_order_release);
    ++entry_count;
    return entry->spec;
}

/* With the mutex held. */
static enum opaq_status intern_new(const char *text, size_t length, const struct opaq_spec *value,
                                   const struct opaq_spec **spec, struct opaq_error *error) {
    char canonical[OPAQ_SPEC_TEXT_BYTES];
    const enum opaq_status status = opaq_spec_print(value, canonical, sizeof canonical, error);
    if (status != OPAQ_OK) {
        return status;
    }
    if (entry_count > OPAQ_INTERN_LIMIT - 2) {
        return opaq_fail(error, OPAQ_ERROR_LIMIT, "spec_intern: %d texts are kept already, which is the limit",
                         entry_count);
    }
    const size_t canonical_length = strlen(canonical);
    const struct opaq_spec *shared = find(canonical, canonical_length);
    if (shared == NULL) {
        shared = insert(canonical, canonical_length, value, NULL);
    }
    const bool is_canonical = length == canonical_length && memcmp(text, canonical, length) == 0;
    if (shared == NULL || (!is_canonical && insert(text, length, value, shared) == NULL)) {
        return opaq_fail(error, OPAQ_ERROR_MEMORY, "spec_intern: no memory for \"%s\"", canonical);
    }
    *spec = shared;
    return OPAQ_OK;
}

enum opaq_status opaq_spec_intern(const char *text, size_t length, const struct opaq_spec **spec,
                                  struct opaq_error *error) {
    if (text == NULL || spec == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "spec_intern: %s is NULL", text == NULL ? "text" : "spec");
    }
    const struct opaq_spec *known = find(text, length);
    if (known != NULL) {
        *spec = known;
        return OPAQ_OK;
    }
    struct opaq_spec value;
    enum opaq_status status = opaq_spec_parse(text, length, &value, error);
    if (status != OPAQ_OK) {
        return status;
    }
    pthread_mutex_lock(&write_mutex);
    known = find(text, length);
    if (known != NULL) {
        *spec = known;
    } else {
        status = intern_new(text, length, &value, spec, error);
    }
    pthread_mutex_unlock(&write_mutex);
    return status;
}
