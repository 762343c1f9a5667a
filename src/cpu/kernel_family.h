/* cpu/kernel_family.h: kernels for one purpose, with one table per instruction set, and the choice among them.
 * Depends on nothing.
 *
 * A table is a constant that begins with a struct kernel_head and has one or more kernels, each of which begins
 * with its name; an empty entry has the name NULL. Tables of one family have one type. The first table that has
 * a kernel, and whose features the processor has, serves it; the last is the reference, which is complete and
 * needs no features. */
#ifndef OPAQ_CPU_KERNEL_FAMILY_H
#define OPAQ_CPU_KERNEL_FAMILY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kernel_head {
    const char *name;  /* "avx2"; in a table with one kernel, the kernel's name: "gemm_avx2" */
    uint32_t features; /* required bits of enum opaq_cpu_feature */
};

/* Consecutive kernels of a table: offset of the first, bytes of each, number. */
struct kernel_range {
    size_t offset, size;
    int count;
};

enum { KERNEL_RANGE_LIMIT = 5 };

struct kernel_family {
    const void *tables; /* an array of pointers to tables, fastest first */
    int table_count;
    struct kernel_range range[KERNEL_RANGE_LIMIT]; /* count 0: unused */
};

/* The table that serves the kernel at `offset` on a processor with these features. */
const void *kernel_family_table(const struct kernel_family *family, size_t offset, uint32_t features);

/* The kernel at `offset` for this processor, or the one that is forced by name (opaq/kernel.h). */
const void *kernel_family_choose(const struct kernel_family *family, size_t offset);

/* Table `index`, and the name of a kernel at an offset. */
const void *kernel_family_at(const struct kernel_family *family, int index);
const char *kernel_name_at(const void *table, size_t offset);

#endif
