/* base/forced_kernels.c: the list of forced kernel names. */
#include "base/forced_kernels.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* Lists are never freed, because another thread may still be reading one. */
struct list {
    struct list *before;
    char names[];
};

static _Atomic(struct list *) newest;

/* Publishes `list` in place of `before`; false if another thread replaced `before` first. */
static bool add(struct list *list, struct list *before) {
    list->before = before;
    return atomic_compare_exchange_strong(&newest, &before, list);
}

static struct list *list_of(const char *names) {
    const size_t bytes = strlen(names) + 1;
    struct list *list = malloc(sizeof *list + bytes);
    if (list != NULL) {
        memcpy(list->names, names, bytes);
    }
    return list;
}

/* The environment is read once. */
const char *forced_kernels(void) {
    const struct list *known = atomic_load_explicit(&newest, memory_order_acquire);
    if (known != NULL) {
        return known->names;
    }
    const char *const names = getenv("OPAQ_KERNEL");
    struct list *list = list_of(names == NULL ? "" : names);
    if (list == NULL) {
        return "";
    }
    if (add(list, NULL)) {
        return list->names;
    }
    free(list); /* another thread published first */
    return atomic_load(&newest)->names;
}

bool forced_kernels_set(const char *names) {
    struct list *list = list_of(names);
    while (list != NULL && !add(list, atomic_load(&newest))) {
    }
    return list != NULL;
}

const char *kernel_name_next(const char *list, size_t *length, const char **rest) {
    list += strspn(list, ", ");
    *length = strcspn(list, ", ");
    *rest = list + *length;
    return *length == 0 ? NULL : list;
}

bool kernel_is_forced(const char *name) {
    const char *list = forced_kernels();
    const size_t wanted = strlen(name);
    size_t length;
    for (const char *one = kernel_name_next(list, &length, &list); one != NULL;
         one = kernel_name_next(list, &length, &list)) {
        if (length == wanted && memcmp(one, name, length) == 0) {
            return true;
        }
    }
    return false;
}
