/* cli/read/inputs.c: see inputs.h. A hash table of device and inode numbers. */
#include "cli/read/inputs.h"

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "cli/cli_memory.h"

struct identity {
    dev_t device;
    ino_t number;
    bool is_used;
};

static struct identity *table;
static size_t capacity; /* a power of two, or 0 */
static size_t count;

/* The slot of the file, or the empty slot where it belongs. */
static struct identity *find(const struct stat *file) {
    const uint64_t hash = ((uint64_t)file->st_ino ^ (uint64_t)file->st_dev << 32) * 0x9E3779B97F4A7C15u;
    size_t at = (size_t)(hash >> 32) & (capacity - 1);
    while (table[at].is_used && (table[at].number != file->st_ino || table[at].device != file->st_dev)) {
        at = (at + 1) & (capacity - 1);
    }
    return &table[at];
}

static void grow(void) {
    struct identity *const old = table;
    const size_t old_capacity = capacity;
    capacity = capacity == 0 ? 64 : 2 * capacity;
    table = alloc_array(capacity, sizeof *table);
    for (size_t i = 0; i < old_capacity; ++i) {
        if (old[i].is_used) {
            *find(&(struct stat){.st_dev = old[i].device, .st_ino = old[i].number}) = old[i];
        }
    }
    free(old);
}

void inputs_add(const struct stat *file) {
    if (2 * count >= capacity) {
        grow();
    }
    struct identity *const slot = find(file);
    count += !slot->is_used;
    *slot = (struct identity){file->st_dev, file->st_ino, true};
}

bool inputs_have(const struct stat *file) { return capacity != 0 && find(file)->is_used; }
