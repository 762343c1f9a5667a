/* cpu/kernel_family.c: chooses among tables of kernels. */
#include "cpu/kernel_family.h"

#include <string.h>

#include "base/forced_kernels.h"
#include "opaq/cpu.h"

const void *kernel_family_at(const struct kernel_family *family, int index) {
    const void *table;
    memcpy(&table, (const char *)family->tables + (size_t)index * sizeof table, sizeof table);
    return table;
}

const char *kernel_name_at(const void *table, size_t offset) {
    const char *name;
    memcpy(&name, (const char *)table + offset, sizeof name);
    return name;
}

static bool can_run(const void *table, uint32_t features) {
    struct kernel_head head;
    memcpy(&head, table, sizeof head);
    return (head.features & ~features) == 0;
}

const void *kernel_family_table(const struct kernel_family *family, size_t offset, uint32_t features) {
    for (int i = 0; i + 1 < family->table_count; ++i) {
        const void *const table = kernel_family_at(family, i);
        if (kernel_name_at(table, offset) != NULL && can_run(table, features)) {
            return table;
        }
    }
    return kernel_family_at(family, family->table_count - 1);
}

const void *kernel_family_choose(const struct kernel_family *family, size_t offset) {
    const uint32_t features = opaq_cpu_features();
    for (int i = 0; forced_kernels()[0] != '\0' && i < family->table_count; ++i) {
        const void *const table = kernel_family_at(family, i);
        const char *const name = kernel_name_at(table, offset);
        if (name != NULL && can_run(table, features) && kernel_is_forced(name)) {
            return (const char *)table + offset;
        }
    }
    return (const char *)kernel_family_table(family, offset, features) + offset;
}
