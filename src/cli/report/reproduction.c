/* cli/report/reproduction.c: see reproduction.h. Formats, rules, elements and options come from the library's tables, so
 * a new one is part of the comparison without an edit here. */
#include "cli/report/reproduction.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli_memory.h"
#include "cli/cli_try.h"
#include "opaq/element.h"
#include "opaq/op.h"
#include "opaq/spec.h"

/* Sizes with a remainder for every block, panel and vector: rows of x, columns of x, rows of w. */
enum { M = 19, K = 288, N = 80, INNER = 48 };
enum { SEED = 20260101, WORDS_LIMIT = 16 };

static const int64_t x_shape[2] = {M, K};
static const int64_t w_shape[2] = {N, K};
static const int64_t gate_up_shape[2] = {2 * INNER, K};
static const int64_t down_shape[2] = {K, INNER};

/* x, w and dy of a layer by each recipe, and quantized weights alone. */
static const char *const linear_plans[] = {
    "grad=xwb",
    "x=fp8 w=fp8 dy=fp8.e5m2 grad=xwb",
    "x=fp8blk1+pow2 w=fp8blk2+pow2 dy=fp8blk1+pow2 grad=xwb",
    "x=mxfp8 w=mxfp8 dy=mxfp8 grad=xwb",
    "x=nvfp4+rht w=nvfp4+2d dy=nvfp4+rht+sr grad=xwb",
    "w=nvfp4 grad=xwb",
    "w=mxfp4 grad=xwb",
    "w=mxfp8 grad=xwb",
    "w=fp8row grad=xwb",
    "w=fp8blk2 grad=xwb",
};
static const char *const mlp_plans[] = {
    "act=silu",
    "act=gelu",
    "act=gelu_tanh",
    "act=relu2",
    "act=silu x=mxfp8 w=mxfp8",
    "act=silu x=nvfp4 w=nvfp4",
};
static const char *const precisions[] = {"exact", "near", "fast", "fast32"};
static const int dtypes[] = {OPAQ_DTYPE_BF16, OPAQ_DTYPE_F32};
#define DTYPE_COUNT (sizeof dtypes / sizeof dtypes[0])

/* ---- hashing: FNV-1a with 64 bits */

static uint64_t hash_bytes(uint64_t hash, const void *bytes, size_t count) {
    const unsigned char *const from = bytes;
    for (size_t i = 0; i < count; ++i) {
        hash = (hash ^ from[i]) * 0x100000001B3u;
    }
    return hash;
}

static const uint64_t hash_start = 0xCBF29CE484222325u;

/* ---- numbers */

struct block {
    uint32_t word[4];
};

/* Philox 4x32 with 10 rounds, key (SEED, stream). */
static struct block random_block(uint32_t index, uint32_t stream) {
    struct block b = {{index, 0, 0, 0}};
    uint32_t key[2] = {SEED, stream};
    for (int round = 0; round < 10; ++round) {
        const uint64_t left = (uint64_t)0xD2511F53u * b.word[0];
        const uint64_t right = (uint64_t)0xCD9E8D57u * b.word[2];
        b = (struct block){{(uint32_t)(right >> 32) ^ b.word[1] ^ key[0], (uint32_t)right,
                            (uint32_t)(left >> 32) ^ b.word[3] ^ key[1], (uint32_t)left}};
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    return b;
}

/* Random number with 8 significant bits: a sum of uniform numbers times a power of two from 2^-12 to 2^-5,
 * times 32 for one in 64; one in 50 is 0. */
static float number(uint32_t index, uint32_t stream) {
    const struct block b = random_block(index, stream);
    int sum = 0;
    for (int i = 0; i < 4; ++i) {
        sum += (int)(b.word[0] >> 8 * i & 0x3F);
    }
    const int octave = (int)(b.word[1] % 8) + (b.word[2] % 64 == 0 ? 5 : 0);
    const float scale = (float)(1 << octave) / 4096.0f;
    return b.word[3] % 50 == 0 ? 0.0f : (float)(sum - 126) * scale;
}

static size_t dtype_bytes(int dtype) {
    switch (dtype) {
    case OPAQ_DTYPE_U8:
        return 1;
    case OPAQ_DTYPE_F16:
    case OPAQ_DTYPE_BF16:
        return 2;
    case OPAQ_DTYPE_I64:
        return 8;
    default:
        return 4;
    }
}

static size_t tensor_bytes(const struct opaq_tensor *tensor) {
    size_t bytes = dtype_bytes(tensor->dtype);
    for (int i = 0; i < tensor->rank; ++i) {
        bytes *= (size_t)tensor->shape[i];
    }
    return bytes;
}

/* A tensor of numbers; one of rank 1 has shape[0] of them. The memory is released with free(). */
static struct opaq_tensor make_tensor(const int64_t *shape, int rank, int dtype, uint32_t stream) {
    struct opaq_tensor tensor = {.dtype = dtype, .rank = rank};
    for (int i = 0; i < rank; ++i) {
        tensor.shape[i] = shape[i];
        tensor.strides[i] = i + 1 < rank ? shape[i + 1] : 1;
    }
    const size_t bytes = tensor_bytes(&tensor);
    tensor.data = alloc_aligned(bytes);
    for (uint32_t i = 0; i < bytes / dtype_bytes(dtype); ++i) {
        const float value = number(i, stream);
        if (dtype == OPAQ_DTYPE_F32) {
            ((float *)tensor.data)[i] = value;
        } else {
            ((uint16_t *)tensor.data)[i] = (uint16_t)opaq_element_encode(OPAQ_BF16, value, OPAQ_SATURATE);
        }
    }
    return tensor;
}

/* ---- running operators */

/* The outputs of an operator, and their memory. */
struct run {
    const struct opaq_op *op;
    struct opaq_outputs outputs;
    void *workspace;
};

static enum opaq_status give_memory(void *context, struct opaq_outputs *outputs, size_t bytes,
                                    struct opaq_span *workspace, struct opaq_error *error) {
    struct run *const run = context;
    (void)error;
    for (int i = 0; i < outputs->count; ++i) {
        outputs->tensor[i].data = alloc_aligned(tensor_bytes(&outputs->tensor[i]) + 1);
    }
    for (int row = 0; row < run->op->output_count; ++row) {
        if (run->op->output[row].is_random && outputs->first[row + 1] > outputs->first[row]) {
            memcpy(outputs->tensor[outputs->first[row]].data, (const int64_t[2]){SEED, 3}, 2 * sizeof(int64_t));
        }
    }
    run->workspace = bytes == 0 ? NULL : alloc_aligned(bytes);
    *workspace = (struct opaq_span){run->workspace, bytes};
    run->outputs = *outputs;
    return OPAQ_OK;
}

static void release_run(struct run *run) {
    for (int i = 0; i < run->outputs.count; ++i) {
        free(run->outputs.tensor[i].data);
    }
    free(run->workspace);
    *run = (struct run){0};
}

/* What one comparison uses, released together. */
struct operands {
    struct opaq_tensor tensor[4];
    int count;
    struct run run[2];
};

static struct opaq_value tensor_value(const struct opaq_tensor *tensor) {
    return (struct opaq_value){.tensors = tensor, .count = 1};
}

static struct opaq_value add_tensor(struct operands *operands, const int64_t *shape, int rank, int dtype,
                                    uint32_t stream) {
    struct opaq_tensor *const tensor = &operands->tensor[operands->count++];
    *tensor = make_tensor(shape, rank, dtype, stream);
    return tensor_value(tensor);
}

static void release_operands(struct operands *operands) {
    for (int i = 0; i < operands->count; ++i) {
        free(operands->tensor[i].data);
    }
    release_run(&operands->run[0]);
    release_run(&operands->run[1]);
}

static enum opaq_status run_operator(const char *name, const struct opaq_value *values,
                                     const struct opaq_execution *execution, struct run *run, uint64_t *hash,
                                     struct opaq_error *error) {
    *run = (struct run){.op = opaq_op_find(name)};
    const struct opaq_memory memory = {give_memory, run};
    CLI_TRY(opaq_op_call(run->op, values, &memory, execution, error));
    for (int i = 0; i < run->outputs.count; ++i) {
        const struct opaq_tensor *const tensor = &run->outputs.tensor[i];
        *hash = hash_bytes(*hash, tensor->data, tensor_bytes(tensor));
    }
    return OPAQ_OK;
}

static struct opaq_value text_value(const char *text) {
    return (struct opaq_value){.text = text, .count = (int64_t)strlen(text)};
}

static struct opaq_value sizes_value(const int64_t *sizes) {
    return (struct opaq_value){.sizes = sizes, .count = 2};
}

static struct opaq_value output_value(const struct run *run, int row) {
    const int first = run->outputs.first[row];
    return (struct opaq_value){.tensors = &run->outputs.tensor[first],
                               .count = run->outputs.first[row + 1] - first};
}

static void add_result(struct reproduction *reproduction, const char *operation, const char *what,
                       uint64_t hash, bool is_portable) {
    reproduction->results = grow_array(reproduction->results, reproduction->count, &reproduction->capacity,
                                       sizeof *reproduction->results);
    reproduction->results[reproduction->count++] =
        (struct reproduction_result){operation, copy_text(what, strlen(what)), hash, is_portable};
}

/* ---- quantize, dequantize */

static enum opaq_status quantize(struct opaq_value x, const char *text, const struct opaq_execution *execution,
                                 struct run *run, uint64_t *hash, struct opaq_error *error) {
    struct opaq_spec spec;
    CLI_TRY(opaq_spec_parse(text, strlen(text), &spec, error));
    float scale_number = 0.75f;
    int64_t random_numbers[2] = {SEED, 1};
    const struct opaq_tensor scale = {
        .data = &scale_number, .dtype = OPAQ_DTYPE_F32, .rank = 1, .shape = {1}, .strides = {1}};
    const struct opaq_tensor random = {
        .data = random_numbers, .dtype = OPAQ_DTYPE_I64, .rank = 1, .shape = {2}, .strides = {1}};
    struct opaq_value values[WORDS_LIMIT] = {x, text_value(text)};
    if ((spec.options & OPAQ_DELAYED) != 0) {
        values[2] = tensor_value(&scale);
    }
    if ((spec.options & OPAQ_STOCHASTIC) != 0) {
        values[5] = tensor_value(&random);
    }
    return run_operator("quantize", values, execution, run, hash, error);
}

static enum opaq_status quantize_and_back(struct operands *operands, const char *text, int dtype,
                                          const struct opaq_execution *execution, uint64_t *quantized,
                                          uint64_t *dequantized, struct opaq_error *error) {
    const struct opaq_value x = add_tensor(operands, x_shape, 2, dtype, 1);
    CLI_TRY(quantize(x, text, execution, &operands->run[0], quantized, error));
    const struct opaq_value values[WORDS_LIMIT] = {
        output_value(&operands->run[0], 0), text_value(text), sizes_value(x_shape), {.integer = dtype}};
    return run_operator("dequantize", values, execution, &operands->run[1], dequantized, error);
}

static enum opaq_status add_quantizer(struct reproduction *reproduction, const char *text,
                                      const struct opaq_execution *execution, struct opaq_error *error) {
    uint64_t quantized = hash_start;
    uint64_t dequantized = hash_start;
    for (size_t i = 0; i < DTYPE_COUNT; ++i) {
        struct operands operands = {0};
        const enum opaq_status status =
            quantize_and_back(&operands, text, dtypes[i], execution, &quantized, &dequantized, error);
        release_operands(&operands);
        CLI_TRY(status);
    }
    add_result(reproduction, "quantize", text, quantized, true);
    add_result(reproduction, "dequantize", text, dequantized, true);
    return OPAQ_OK;
}

static bool is_spec(const char *text) {
    struct opaq_spec spec;
    return opaq_spec_parse(text, strlen(text), &spec, NULL) == OPAQ_OK;
}

/* Adds a quantizer: the format with an ending ".element" and an option "+key=value", both possibly empty, with both
 * copies or, if that is invalid, the rowwise one only. Skipped if that is invalid too. */
static enum opaq_status add_if_valid(struct reproduction *reproduction, const char *format,
                                     const char *const ending[2], const char *const option[2],
                                     const struct opaq_execution *execution, struct opaq_error *error) {
    static const char *const usages[] = {"+both", ""};
    for (int i = 0; i < 2; ++i) {
        struct text text = {NULL, 0, 0};
        text_print(&text, "%s%s%s%s%s%s", format, ending[0], ending[1], usages[i], option[0], option[1]);
        const bool is_valid = is_spec(text_get(&text));
        const enum opaq_status status =
            is_valid ? add_quantizer(reproduction, text_get(&text), execution, error) : OPAQ_OK;
        text_free(&text);
        if (is_valid) {
            return status;
        }
    }
    return OPAQ_OK;
}

/* A format with each of its elements, rules and options. */
static enum opaq_status add_format(struct reproduction *reproduction, const struct opaq_format_row *row,
                                   const struct opaq_execution *execution, struct opaq_error *error) {
    static const char *const none[2] = {"", ""};
    for (int element = 0; element < OPAQ_ELEMENT_COUNT; ++element) {
        const char *const ending[2] = {".", opaq_element_info((enum opaq_element)element)->name};
        if ((row->elements & 1u << element) != 0) {
            CLI_TRY(add_if_valid(reproduction, row->name, ending, none, execution, error));
        }
    }
    for (int rule = 0; rule < OPAQ_RULE_COUNT; ++rule) {
        const char *const option[2] = {"+rule=", opaq_rule_name((enum opaq_rule)rule)};
        if ((row->rules & 1u << rule) != 0 && rule != OPAQ_RULE_TE) {
            CLI_TRY(add_if_valid(reproduction, row->name, none, option, execution, error));
        }
    }
    for (int bit = 0; bit < 16; ++bit) {
        const char *const option[2] = {"+", opaq_option_name((enum opaq_option)(1 << bit))};
        if ((row->options & 1u << bit) != 0 && option[1] != NULL) {
            CLI_TRY(add_if_valid(reproduction, row->name, none, option, execution, error));
        }
    }
    return OPAQ_OK;
}

/* ---- products */

/* A plan, and one hash over all dtypes for each of at most two operators. */
struct product {
    const char *plan;
    const char *weight; /* quantizer of a weight that is packed; NULL: none is */
    uint64_t hash[2];
};

static enum opaq_status run_linear(struct operands *operands, struct product *product, int dtype,
                                   const struct opaq_execution *execution, struct opaq_error *error) {
    const struct opaq_value plan = text_value(product->plan);
    const struct opaq_value x = add_tensor(operands, x_shape, 2, dtype, 1);
    const struct opaq_value w = add_tensor(operands, w_shape, 2, dtype, 2);
    const struct opaq_value bias = add_tensor(operands, w_shape, 1, dtype, 3);
    const struct opaq_value dy = add_tensor(operands, (const int64_t[2]){M, N}, 2, dtype, 4);
    const struct opaq_value x_sizes = sizes_value(x_shape);
    const struct opaq_value w_sizes = sizes_value(w_shape);
    struct run *const forward = &operands->run[0];
    const struct opaq_value values[WORDS_LIMIT] = {x, w, bias, x_sizes, w_sizes, {.integer = dtype}, plan};
    CLI_TRY(run_operator("linear_forward", values, execution, forward, &product->hash[0], error));
    const struct opaq_value x_saved = output_value(forward, 1);
    const struct opaq_value w_saved = output_value(forward, 2);
    const struct opaq_value random = output_value(forward, 4);
    struct opaq_value gradients[WORDS_LIMIT] = {
        dy,
        x_saved.count != 0 ? x_saved : x,
        w_saved.count != 0 ? w_saved : w,
        x_sizes,
        w_sizes,
        {.integer = dtype},
        {.integer = dtype},
        plan,
    };
    if (random.count != 0) {
        gradients[8] = random;
    }
    return run_operator("linear_backward", gradients, execution, &operands->run[1], &product->hash[1], error);
}

static enum opaq_status run_mlp(struct operands *operands, struct product *product, int dtype,
                                const struct opaq_execution *execution, struct opaq_error *error) {
    const struct opaq_value x = add_tensor(operands, x_shape, 2, dtype, 1);
    const struct opaq_value gate_up = add_tensor(operands, gate_up_shape, 2, dtype, 5);
    const struct opaq_value down = add_tensor(operands, down_shape, 2, dtype, 6);
    const struct opaq_value values[WORDS_LIMIT] = {x,
                                                   gate_up,
                                                   down,
                                                   {0},
                                                   {0},
                                                   sizes_value(gate_up_shape),
                                                   sizes_value(down_shape),
                                                   text_value(product->plan)};
    return run_operator("mlp", values, execution, &operands->run[0], &product->hash[0], error);
}

/* A product with a tiled weight, whose kernels add in an order that depends on the instruction set. */
static enum opaq_status run_tiled(struct operands *operands, struct product *product, int dtype,
                                  const struct opaq_execution *execution, struct opaq_error *error) {
    uint64_t ignored = hash_start;
    const struct opaq_value x = add_tensor(operands, x_shape, 2, dtype, 1);
    const struct opaq_value w = add_tensor(operands, w_shape, 2, dtype, 2);
    CLI_TRY(quantize(w, product->weight, execution, &operands->run[0], &ignored, error));
    const struct opaq_value values[WORDS_LIMIT] = {
        x, output_value(&operands->run[0], 0), {0}, sizes_value(w_shape), text_value(product->plan)};
    return run_operator("linear", values, execution, &operands->run[1], &product->hash[0], error);
}

/* Runs a product in all dtypes. */
static enum opaq_status run_dtypes(enum opaq_status (*run)(struct operands *, struct product *, int,
                                                           const struct opaq_execution *, struct opaq_error *),
                                   struct product *product, const struct opaq_execution *execution,
                                   struct opaq_error *error) {
    product->hash[0] = product->hash[1] = hash_start;
    for (size_t i = 0; i < DTYPE_COUNT; ++i) {
        struct operands operands = {0};
        const enum opaq_status status = run(&operands, product, dtypes[i], execution, error);
        release_operands(&operands);
        CLI_TRY(status);
    }
    return OPAQ_OK;
}

static enum opaq_status add_linear(struct reproduction *reproduction, const char *plan,
                                   const struct opaq_execution *execution, struct opaq_error *error) {
    struct product product = {.plan = plan};
    CLI_TRY(run_dtypes(run_linear, &product, execution, error));
    add_result(reproduction, "linear_forward", plan, product.hash[0], true);
    add_result(reproduction, "linear_backward", plan, product.hash[1], true);
    return OPAQ_OK;
}

static enum opaq_status add_mlp(struct reproduction *reproduction, const char *plan,
                                const struct opaq_execution *execution, struct opaq_error *error) {
    struct product product = {.plan = plan};
    CLI_TRY(run_dtypes(run_mlp, &product, execution, error));
    add_result(reproduction, "mlp", plan, product.hash[0], true);
    return OPAQ_OK;
}

static enum opaq_status add_tiled(struct reproduction *reproduction, const char *plan, const char *weight,
                                  const struct opaq_execution *execution, struct opaq_error *error) {
    struct product product = {.plan = plan, .weight = weight};
    CLI_TRY(run_dtypes(run_tiled, &product, execution, error));
    add_result(reproduction, "linear", plan, product.hash[0], false);
    return OPAQ_OK;
}

/* A tiled weight of a format in every precision; nothing if the format cannot be tiled. */
static enum opaq_status add_tiled_format(struct reproduction *reproduction, const char *format,
                                         const struct opaq_execution *execution, struct opaq_error *error) {
    for (size_t i = 0; i < sizeof precisions / sizeof precisions[0]; ++i) {
        char weight[OPAQ_SPEC_TEXT_BYTES];
        char plan[OPAQ_SPEC_TEXT_BYTES + 64];
        (void)snprintf(weight, sizeof weight, "%s+tiled", format);
        (void)snprintf(plan, sizeof plan, "w_given=%s precision=%s", weight, precisions[i]);
        if (is_spec(weight)) {
            CLI_TRY(add_tiled(reproduction, plan, weight, execution, error));
        }
    }
    return OPAQ_OK;
}

enum opaq_status reproduction_compute(const struct opaq_execution *execution, struct reproduction *reproduction,
                                      struct opaq_error *error) {
    *reproduction = (struct reproduction){0};
    for (int format = 0; format < OPAQ_FORMAT_COUNT; ++format) {
        CLI_TRY(add_format(reproduction, opaq_format_row((enum opaq_format)format), execution, error));
    }
    for (size_t i = 0; i < sizeof linear_plans / sizeof linear_plans[0]; ++i) {
        CLI_TRY(add_linear(reproduction, linear_plans[i], execution, error));
    }
    for (size_t i = 0; i < sizeof mlp_plans / sizeof mlp_plans[0]; ++i) {
        CLI_TRY(add_mlp(reproduction, mlp_plans[i], execution, error));
    }
    for (int format = 0; format < OPAQ_FORMAT_COUNT; ++format) {
        const char *const name = opaq_format_row((enum opaq_format)format)->name;
        CLI_TRY(add_tiled_format(reproduction, name, execution, error));
    }
    return OPAQ_OK;
}

uint64_t reproduction_hash(const struct reproduction *reproduction, bool is_portable) {
    uint64_t hash = hash_start;
    for (size_t i = 0; i < reproduction->count; ++i) {
        const struct reproduction_result *const result = &reproduction->results[i];
        if (result->is_portable == is_portable) {
            struct text line = {NULL, 0, 0};
            text_print(&line, "%s %s %016llx\n", result->operation, result->what,
                       (unsigned long long)result->hash);
            hash = hash_bytes(hash, line.bytes, line.length);
            text_free(&line);
        }
    }
    return hash;
}

void reproduction_release(struct reproduction *reproduction) {
    for (size_t i = 0; i < reproduction->count; ++i) {
        free(reproduction->results[i].what);
    }
    free(reproduction->results);
    *reproduction = (struct reproduction){0};
}
