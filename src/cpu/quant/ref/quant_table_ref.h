/* cpu/quant/ref/quant_table_ref.h: the reference kernels. Depends on quant_table.h. */
#ifndef OPAQ_CPU_QUANT_REF_QUANT_TABLE_REF_H
#define OPAQ_CPU_QUANT_REF_QUANT_TABLE_REF_H

#include "cpu/quant/quant_table.h"

extern const struct quant_table quant_table_ref;

/* quantize_fp8_ref.c: one scale per tensor; one per block (fp8row: a block is a row). */
void quantize_fp8_tensor_ref(const struct quant_job *job, const struct quant_copy *copy, int64_t r,
                             int64_t r_end);
void quantize_fp8_blocks_ref(const struct quant_job *job, const struct quant_copy *copy, int64_t r,
                             int64_t r_end);

/* quantize_mx_ref.c */
void quantize_mx_ref(const struct quant_job *job, const struct quant_copy *copy, int64_t r, int64_t r_end);

/* quantize_nvfp4_ref.c */
void quantize_nvfp4_ref(const struct quant_job *job, const struct quant_copy *copy, int64_t r, int64_t r_end);

/* dequantize_ref.c: every format */
void dequantize_ref(const struct quant_job *job, const struct quant_copy *copy, int64_t r, int64_t r_end);

/* amax_ref.c */
void amax_ref(const struct quant_copy *copy, const struct opaq_spec *spec, int64_t r, int64_t r_end,
              float *amax, int64_t step);

#endif
