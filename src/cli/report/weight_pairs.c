/* cli/report/weight_pairs.c: see weight_pairs.h. */
#include "cli/report/weight_pairs.h"

#include <stdlib.h>
#include <string.h>

struct pairing {
    struct weight_pairs *pairs;
    size_t capacity;
    bool *is_taken; /* of the quantized weights */
};

static bool is_readable(const struct weight *weight) {
    return weight->scheme != NULL || weight_is_float(weight);
}

bool pair_is_bytes(const struct weight_pair *pair) {
    const struct weight *const a = pair->original.weight;
    const struct weight *const b = pair->quantized.weight;
    return a->scheme == NULL && b->scheme == NULL && a->data->tensor->dtype == b->data->tensor->dtype &&
           !pair->original.is_transposed && pair->matrices == a->stack && pair->matrices == b->stack &&
           pair->original.rows == a->rows && pair->quantized.rows == b->rows;
}

bool pair_is_floats(const struct weight_pair *pair) {
    return is_readable(pair->original.weight) && is_readable(pair->quantized.weight);
}

uint64_t pair_elements(const struct weight_pair *pair) {
    const struct weight_slice *const slice =
        pair->quantized.weight == NULL ? &pair->original : &pair->quantized;
    return (uint64_t)pair->matrices * (uint64_t)slice->rows * (uint64_t)slice->columns;
}

static void add_pair(struct pairing *pairing, struct weight_pair pair) {
    struct weight_pairs *const pairs = pairing->pairs;
    pair.name = pair.quantized.weight != NULL ? pair.quantized.name : pair.original.name;
    pairs->items = grow_array(pairs->items, pairs->count, &pairing->capacity, sizeof *pairs->items);
    pairs->items[pairs->count++] = pair;
}

/* gpt-oss stores its experts as [out, in] when quantized and transposed when plain. */
static bool transpose_if_gpt_oss(struct weight_slice *plain, const struct weight *blocks) {
    const struct weight *const weight = plain->weight;
    const bool is_transposed = blocks->scheme != NULL && blocks->scheme->layout == OPAQ_LAYOUT_GPT_OSS &&
                               weight_is_float(weight) && weight->rows == blocks->columns &&
                               weight->columns == blocks->rows;
    if (is_transposed) {
        plain->is_transposed = true;
        plain->rows = weight->columns;
        plain->columns = weight->rows;
    }
    return is_transposed;
}

static bool are_shapes_equal(const struct weight *a, const struct weight *b) {
    int64_t a_shape[ST_RANK_LIMIT];
    int64_t b_shape[ST_RANK_LIMIT];
    const int rank = weight_shape(a, a_shape);
    return weight_shape(b, b_shape) == rank && memcmp(a_shape, b_shape, (size_t)rank * sizeof *a_shape) == 0;
}

static void pair_whole(struct pairing *pairing, const struct weight *original, const struct weight *quantized) {
    struct weight_pair pair = {.original = weight_whole(original), .quantized = weight_whole(quantized)};
    pair.matrices = quantized->stack;
    const bool is_transposed =
        transpose_if_gpt_oss(&pair.original, quantized) || transpose_if_gpt_oss(&pair.quantized, original);
    pair.is_other_shape =
        original->stack != quantized->stack || (!is_transposed && !are_shapes_equal(original, quantized));
    add_pair(pairing, pair);
}

static void take(struct pairing *pairing, const struct weight *quantized) {
    pairing->is_taken[quantized - pairing->pairs->quantized->weights.items] = true;
}

/* Pairs the experts of a stack with single weights of the other checkpoint. False if there are none. */
static bool pair_slices(struct pairing *pairing, const struct weight *original) {
    struct weight_slice *slices = NULL;
    const size_t count = weight_slices(&pairing->pairs->original->model, original, &slices);
    bool is_any = false;
    for (size_t i = 0; i < count; ++i) {
        is_any |= weights_named(&pairing->pairs->quantized->weights, slices[i].name) != NULL;
    }
    if (!is_any) {
        weight_slices_free(slices, count);
        return false;
    }
    for (size_t i = 0; i < count; ++i) {
        const struct weight *const single = weights_named(&pairing->pairs->quantized->weights, slices[i].name);
        struct weight_pair pair = {.original = slices[i], .matrices = 1};
        if (single != NULL) {
            take(pairing, single);
            pair.quantized = weight_whole(single);
            pair.is_other_shape =
                single->stack != 1 || single->rows != slices[i].rows || single->columns != slices[i].columns;
        }
        add_pair(pairing, pair);
    }
    free(slices); /* the pairs own the names now */
    return true;
}

static bool is_calibration(const struct weight *weight) {
    static const char ending[] = "_scale";
    const size_t length = strlen(weight->name);
    return weight->scheme == NULL && weight_elements(weight) == 1 && length > strlen(ending) &&
           strcmp(weight->name + length - strlen(ending), ending) == 0;
}

static int compare_pairs(const void *first, const void *second) {
    return strcmp(((const struct weight_pair *)first)->name, ((const struct weight_pair *)second)->name);
}

void weight_pairs_make(const struct checkpoint *original, const struct checkpoint *quantized,
                       struct weight_pairs *pairs) {
    *pairs = (struct weight_pairs){.original = original, .quantized = quantized};
    struct pairing pairing = {.pairs = pairs};
    pairing.is_taken = alloc_array(quantized->weights.count, sizeof *pairing.is_taken);
    for (size_t i = 0; i < original->weights.count; ++i) {
        const struct weight *const weight = &original->weights.items[i];
        const struct weight *const same = weights_named(&quantized->weights, weight->name);
        if (same != NULL) {
            take(&pairing, same);
            pair_whole(&pairing, weight, same);
        } else if (!pair_slices(&pairing, weight) && !is_calibration(weight)) {
            add_pair(&pairing,
                     (struct weight_pair){.original = weight_whole(weight), .matrices = weight->stack});
        }
    }
    for (size_t i = 0; i < quantized->weights.count; ++i) {
        const struct weight *const weight = &quantized->weights.items[i];
        if (!pairing.is_taken[i] && !is_calibration(weight)) {
            add_pair(&pairing,
                     (struct weight_pair){.quantized = weight_whole(weight), .matrices = weight->stack});
        }
    }
    free(pairing.is_taken);
    if (pairs->count != 0) {
        qsort(pairs->items, pairs->count, sizeof *pairs->items, compare_pairs);
    }
}

void weight_pairs_free(struct weight_pairs *pairs) {
    for (size_t i = 0; i < pairs->count; ++i) {
        free(pairs->items[i].original.name);
        free(pairs->items[i].quantized.name);
    }
    free(pairs->items);
    *pairs = (struct weight_pairs){0};
}

uint64_t pair_bytes(const struct weight_pair *pair) {
    const struct weight *const weight = pair->quantized.weight;
    return weight == NULL || weight->stack == 0
               ? 0
               : weight_bytes(weight) / (uint64_t)weight->stack * (uint64_t)pair->matrices;
}
