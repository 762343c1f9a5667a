/* cpu/quant/quant_table.h: the kernel tables and how one is chosen. Depends on quant_job.h.
 *
 * Each instruction set has one constant table in a file of its own, compiled with its own flags. A table may
 * leave entries empty: the first table of the list below that has the entry, and whose features the processor
 * has, serves it, and the reference, which has them all, stands last. */
#ifndef OPAQ_CPU_QUANT_QUANT_TABLE_H
#define OPAQ_CPU_QUANT_QUANT_TABLE_H

#include <stddef.h>

#include "backend/quant_job.h"

/* Quantizes or dequantizes operand rows [r, r_end) of one copy; r is a multiple of quant_panel_rows(). Every
 * scale entry that the rows own is written; padding entries are zero already. */
struct quant_kernel {
    const char *name; /* "quantize_nvfp4_ref": operation, format, table */
    void (*run)(const struct quant_job *job, const struct quant_copy *copy, int64_t r, int64_t r_end);
};

/* Both copies of rows [r, r_end) of x in one pass over it, where `covers` says so: it is asked once for the whole job, its
 * amaxes being there. r is a multiple of QUANT_BOTH_ROWS, and r_end too unless it is the last. The reference has none. */
enum { QUANT_BOTH_ROWS = 128 };
struct both_kernel {
    const char *name;
    bool (*covers)(const struct quant_job *job);
    void (*run)(const struct quant_job *job, int64_t r, int64_t r_end);
    const struct both_amaxes *amaxes; /* NULL, or what has to be done beside */
};

/* A scale for each row and each column of x: the amaxes of all have to be there first, and lie where scales go later. */
struct both_amaxes {
    /* Those of rows [r, r_end), and of what these rows have of the columns: they are joined to what is there, zeros at
     * first, of other threads too. */
    void (*find)(const struct quant_job *job, int64_t r, int64_t r_end);
    /* When all are there: whether the kernel can do with them. If not, the copies are to be made apart. */
    bool (*are_usual)(const struct quant_job *job);
    /* When the kernel has run: columns' scales in the place of their amaxes. Those of rows are there already. */
    void (*finish)(const struct quant_job *job);
};

/* The amax of operand rows [r, r_end): one for all of them into *amax, or (step 1) one for each into
 * amax[r], ... */
struct amax_kernel {
    const char *name;
    void (*run)(const struct quant_copy *copy, const struct opaq_spec *spec, int64_t r, int64_t r_end,
                float *amax, int64_t step);
};

/* n codes of operand row `row` from column k on, which lie at `codes` one after another (a row that is packed begins with
 * a whole byte), to floats: each what its code stands for times its factor. k is a multiple of 128, n at most 2048. The
 * reference has none: gemm/gemm_decode.c does it with tables of its own. */
struct decode_row_kernel {
    const char *name;
    void (*run)(const struct opaq_spec *spec, const struct quant_copy *copy, int64_t row, int64_t k,
                const uint8_t *codes, int n, float *to);
};

struct quant_table {
    const char *name;  /* "ref", "avx2", ... */
    uint32_t features; /* bits of enum opaq_cpu_feature that it needs */
    struct quant_kernel quantize[OPAQ_FORMAT_COUNT];
    struct quant_kernel dequantize[OPAQ_FORMAT_COUNT];
    struct both_kernel both[OPAQ_FORMAT_COUNT]; /* may be empty */
    struct amax_kernel amax;
    struct decode_row_kernel decode_row; /* run may be NULL */
};

/* All tables of this build, the fastest first; the reference stands last. */
const struct quant_table *const *quant_tables(int *count);

/* The kernels for this machine. */
const struct quant_kernel *quantize_kernel(enum opaq_format format);
const struct quant_kernel *dequantize_kernel(enum opaq_format format);
const struct both_kernel *both_kernel(enum opaq_format format);
const struct amax_kernel *amax_kernel(void);
const struct decode_row_kernel *decode_row_kernel(void);

/* Rows so short, or columns so few, that the reference is as fast as vectors are: it converts such copies. */
static inline bool quant_copy_is_narrow(const struct quant_copy *copy) {
    return copy->operand.columns < 16 || (copy->usage == OPAQ_COLUMNWISE && copy->operand.rows < 16);
}

/* The kernels for this machine and this copy. */
const struct quant_kernel *quantize_kernel_for(const struct quant_copy *copy, enum opaq_format format);
const struct quant_kernel *dequantize_kernel_for(const struct quant_copy *copy, enum opaq_format format);

/* Whether it is one of the reference's, which quantize and dequantize whatever way codes lie. */
bool quant_is_reference(const struct quant_kernel *kernel);

/* Where a table has its kernel of a format: quant_kernel_offset(quantize, OPAQ_NVFP4). */
#define quant_kernel_offset(member, format) \
    (offsetof(struct quant_table, member) + (size_t)(format) * sizeof(((struct quant_table *)0)->member[0]))

#endif
