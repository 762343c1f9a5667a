/* cpu/quant/quant_table.h: the kernel tables of quantization and the choice among them. Depends on quant_job.h.
 *
 * Each instruction set has one constant table in its own file, compiled with its own flags. Entries may be
 * empty: the first table of the list below that has the entry, and whose features the processor has, serves it.
 * The last table is the reference, which is complete. */
#ifndef OPAQ_CPU_QUANT_QUANT_TABLE_H
#define OPAQ_CPU_QUANT_QUANT_TABLE_H

#include <stddef.h>

#include "backend/quant_job.h"

/* Quantizes or dequantizes operand rows [r, r_end) of one copy; r is a multiple of quant_panel_rows(). Writes
 * all scale entries of the rows; padding entries are already zero. */
struct quant_kernel {
    const char *name; /* "quantize_nvfp4_ref": operation, format, table */
    void (*run)(const struct quant_job *job, const struct quant_copy *copy, int64_t r, int64_t r_end);
};

/* Quantizes both copies of rows [r, r_end) of x in one pass, if `covers` returns true, which is called once per
 * job, after its amaxes are computed. r is a multiple of QUANT_BOTH_ROWS, and so is r_end unless it is the
 * last. The reference has no such kernels. */
enum { QUANT_BOTH_ROWS = 128 };
struct both_kernel {
    const char *name;
    bool (*covers)(const struct quant_job *job);
    void (*run)(const struct quant_job *job, int64_t r, int64_t r_end);
    const struct both_amaxes *amaxes; /* NULL, or the amax pass that must run first */
};

/* For formats with a scale per row and per column of x: a first pass computes all amaxes and stores them in the
 * entries of the scales. */
struct both_amaxes {
    /* Computes the amaxes of rows [r, r_end), and merges their columns' amaxes by maximum into the entries,
     * which start as zeros; other threads do the same for other rows. */
    void (*find)(const struct quant_job *job, int64_t r, int64_t r_end);
    /* Called when all amaxes are computed: returns false if any is NaN or infinite, or otherwise not supported
     * by the kernel. The copies are then quantized separately. */
    bool (*amaxes_in_range)(const struct quant_job *job);
    /* Called after the kernel: replaces columns' amaxes by their scales. Rows' scales are already set. */
    void (*finish)(const struct quant_job *job);
};

/* The amax of operand rows [r, r_end): one for all of them in *amax, or (step 1) one each in amax[r], ... */
struct amax_kernel {
    const char *name;
    void (*run)(const struct quant_copy *copy, const struct opaq_spec *spec, int64_t r, int64_t r_end,
                float *amax, int64_t step);
};

/* Decodes n codes of operand row `row` from column k on: each is its code's value times its factor. The codes
 * are consecutive at `codes` (a packed row begins with a whole byte). k is a multiple of 128, n at most 2048.
 * The reference has none: gemm/gemm_decode.c uses lookup tables instead. */
struct decode_row_kernel {
    const char *name;
    void (*run)(const struct opaq_spec *spec, const struct quant_copy *copy, int64_t row, int64_t k,
                const uint8_t *codes, int n, float *to);
};

struct quant_table {
    const char *name;  /* "ref", "avx2", ... */
    uint32_t features; /* required bits of enum opaq_cpu_feature */
    struct quant_kernel quantize[OPAQ_FORMAT_COUNT];
    struct quant_kernel dequantize[OPAQ_FORMAT_COUNT];
    struct both_kernel both[OPAQ_FORMAT_COUNT]; /* may be empty */
    struct amax_kernel amax;
    struct decode_row_kernel decode_row; /* run may be NULL */
};

/* All tables of this build, fastest first, the reference last. */
const struct quant_table *const *quant_tables(int *count);

/* The kernels for this machine. */
const struct quant_kernel *quantize_kernel(enum opaq_format format);
const struct quant_kernel *dequantize_kernel(enum opaq_format format);
const struct both_kernel *both_kernel(enum opaq_format format);
const struct amax_kernel *amax_kernel(void);
const struct decode_row_kernel *decode_row_kernel(void);

/* Whether rows are so short, or columns so few, that the reference is as fast as the vector kernels; it is then
 * used. */
static inline bool quant_copy_is_narrow(const struct quant_copy *copy) {
    return copy->operand.columns < 16 || (copy->usage == OPAQ_COLUMNWISE && copy->operand.rows < 16);
}

/* The kernels for this machine and this copy. */
const struct quant_kernel *quantize_kernel_for(const struct quant_copy *copy, enum opaq_format format);
const struct quant_kernel *dequantize_kernel_for(const struct quant_copy *copy, enum opaq_format format);

/* Whether it is a reference kernel, which supports every layout of codes. */
bool quant_is_reference(const struct quant_kernel *kernel);

/* The offset of a format's kernel in a table: quant_kernel_offset(quantize, OPAQ_NVFP4). */
#define quant_kernel_offset(member, format) \
    (offsetof(struct quant_table, member) + (size_t)(format) * sizeof(((struct quant_table *)0)->member[0]))

#endif
