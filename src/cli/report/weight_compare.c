/* cli/report/weight_compare.c: see weight_compare.h. Pieces are made in batches: each piece has sums of its own, which are
 * joined in order when the batch is done. */
#include "cli/report/weight_compare.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "cli/console/interrupt.h"

enum { PIECE_ELEMENTS = 1 << 20, PIECE_BYTES = 1 << 22, BLOCK_ROWS = 128, PIECES_PER_THREAD = 8 };

struct piece {
    size_t pair;
    bool is_bytes; /* [first, first + count) of bytes and not of rows */
    int64_t matrix;
    int64_t first;
    int64_t count;
    uint64_t different_bytes;
    struct error_sums sums;
};

struct worker {
    struct row_memory original;
    struct row_memory quantized;
    enum opaq_status status;
    struct opaq_error error;
};

struct comparing {
    const struct weight_pairs *pairs;
    struct progress *progress;
    struct piece *pieces;
    size_t count;
    struct worker *workers;
    atomic_size_t next;
    atomic_bool is_stopping;
};

/* ---- one piece ---- */

static bool is_compared(const struct weight_pair *pair) {
    return pair->original.weight != NULL && pair->quantized.weight != NULL && !pair->is_other_shape &&
           (pair_is_floats(pair) || pair_is_bytes(pair));
}

static uint64_t count_different(const void *first, const void *second, size_t count) {
    const uint8_t *const a = first;
    const uint8_t *const b = second;
    uint64_t different = 0;
    if (memcmp(a, b, count) != 0) {
        for (size_t i = 0; i < count; ++i) {
            different += a[i] != b[i];
        }
    }
    return different;
}

static enum opaq_status compare_bytes_of(const struct weight_pairs *pairs, struct piece *piece,
                                         struct worker *worker) {
    const struct weight_pair *const pair = &pairs->items[piece->pair];
    const size_t count = (size_t)piece->count;
    void *const a = row_memory_take(&worker->original, 0, count);
    void *const b = row_memory_take(&worker->quantized, 0, count);
    const uint64_t first = (uint64_t)piece->first;
    enum opaq_status status =
        model_read(&pairs->original->model, pair->original.weight->data, first, a, count, &worker->error);
    if (status == OPAQ_OK) {
        status =
            model_read(&pairs->quantized->model, pair->quantized.weight->data, first, b, count, &worker->error);
    }
    if (status == OPAQ_OK) {
        piece->different_bytes = count_different(a, b, count);
    }
    return status;
}

static enum opaq_status compare_rows_of(const struct weight_pairs *pairs, struct piece *piece,
                                        struct worker *worker) {
    const struct weight_pair *const pair = &pairs->items[piece->pair];
    struct weight_part original = pair->original;
    struct weight_part quantized = pair->quantized;
    original.matrix += piece->matrix;
    quantized.matrix += piece->matrix;
    struct opaq_view original_rows;
    struct opaq_view quantized_rows;
    enum opaq_status status = part_rows(&pairs->original->model, &original, piece->first, piece->count,
                                        &worker->original, &original_rows, &worker->error);
    if (status == OPAQ_OK) {
        status = part_rows(&pairs->quantized->model, &quantized, piece->first, piece->count, &worker->quantized,
                           &quantized_rows, &worker->error);
    }
    if (status != OPAQ_OK) {
        return status;
    }
    const size_t elements = (size_t)(piece->count * quantized.columns);
    if (pair_is_bytes(pair)) {
        const size_t bytes = elements * (size_t)st_dtype_bits(original.weight->data->tensor->dtype) / 8;
        piece->different_bytes =
            count_different(original_rows.buffer[0].data, quantized_rows.buffer[0].data, bytes);
    }
    error_sums_add(&piece->sums, rows_floats(&original_rows, &worker->original),
                   rows_floats(&quantized_rows, &worker->quantized), elements,
                   (piece->matrix * quantized.rows + piece->first) * quantized.columns);
    return OPAQ_OK;
}

static uint64_t part_bytes(const struct weight_part *part, uint64_t elements) {
    const uint64_t all = weight_elements(part->weight);
    return all == 0 ? 0
                    : (uint64_t)((double)weight_bytes(part->weight) * ((double)elements / (double)all) + 0.5);
}

static uint64_t piece_bytes(const struct weight_pair *pair, const struct piece *piece) {
    const uint64_t elements = (uint64_t)(piece->count * pair->quantized.columns);
    return piece->is_bytes ? 2 * (uint64_t)piece->count
                           : part_bytes(&pair->original, elements) + part_bytes(&pair->quantized, elements);
}

/* A worker takes pieces until none is left. */
static void work(void *argument, int64_t begin, int64_t end) {
    struct comparing *const comparing = argument;
    for (int64_t w = begin; w < end; ++w) {
        struct worker *const worker = &comparing->workers[w];
        for (;;) {
            const size_t at = atomic_fetch_add(&comparing->next, 1);
            if (at >= comparing->count || atomic_load(&comparing->is_stopping) || interrupt_seen()) {
                break;
            }
            struct piece *const piece = &comparing->pieces[at];
            worker->status = piece->is_bytes ? compare_bytes_of(comparing->pairs, piece, worker)
                                             : compare_rows_of(comparing->pairs, piece, worker);
            if (worker->status != OPAQ_OK) {
                atomic_store(&comparing->is_stopping, true);
                break;
            }
            progress_add(comparing->progress, piece_bytes(&comparing->pairs->items[piece->pair], piece));
        }
    }
}

/* ---- all of them ---- */

/* Where the next piece begins. */
struct place {
    size_t pair;
    int64_t matrix;
    int64_t first;
};

static bool is_block_format(const struct weight *weight) {
    return weight->row != NULL && weight->row->format == OPAQ_FP8BLK2;
}

static int64_t rows_of_piece(const struct weight_pair *pair) {
    const int64_t columns = pair->quantized.columns == 0 ? 1 : pair->quantized.columns;
    const int64_t rows = PIECE_ELEMENTS / columns;
    const bool needs_blocks = is_block_format(pair->original.weight) || is_block_format(pair->quantized.weight);
    return rows >= BLOCK_ROWS ? rows / BLOCK_ROWS * BLOCK_ROWS
           : needs_blocks     ? BLOCK_ROWS
           : rows < 1         ? 1
                              : rows;
}

/* Sets the next piece and moves on; false at the end. */
static bool next_piece(const struct weight_pairs *pairs, struct place *place, struct piece *piece) {
    for (; place->pair < pairs->count; ++place->pair, place->matrix = 0, place->first = 0) {
        const struct weight_pair *const pair = &pairs->items[place->pair];
        if (!is_compared(pair) || pair_elements(pair) == 0) {
            continue;
        }
        const bool is_bytes = !pair_is_floats(pair);
        const int64_t length =
            is_bytes ? (int64_t)pair->original.weight->data->tensor->bytes : pair->quantized.rows;
        const int64_t matrices = is_bytes ? 1 : pair->matrices;
        if (place->first >= length) {
            ++place->matrix;
            place->first = 0;
        }
        if (place->matrix >= matrices) {
            continue;
        }
        const int64_t most = is_bytes ? PIECE_BYTES : rows_of_piece(pair);
        piece->pair = place->pair;
        piece->is_bytes = is_bytes;
        piece->matrix = place->matrix;
        piece->first = place->first;
        piece->count = length - place->first < most ? length - place->first : most;
        piece->different_bytes = 0;
        error_sums_clear(&piece->sums);
        place->first += piece->count;
        return true;
    }
    return false;
}

uint64_t compare_bytes(const struct weight_pairs *pairs) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < pairs->count; ++i) {
        const struct weight_pair *const pair = &pairs->items[i];
        if (is_compared(pair)) {
            const uint64_t elements = pair_elements(pair);
            bytes += part_bytes(&pair->original, elements) + part_bytes(&pair->quantized, elements);
        }
    }
    return bytes;
}

static void finish_pair(const struct error_sums *sums, struct comparison *result) {
    if (!is_compared(result->pair)) {
        return;
    }
    result->has_error = pair_is_floats(result->pair);
    if (result->has_error) {
        weight_error_of(sums, &result->error);
        result->different_elements = sums->elements - sums->exact - sums->agreeing;
        result->rounded_elements = sums->rounded;
    }
    result->is_equal =
        pair_is_bytes(result->pair) ? result->different_bytes == 0 : result->different_elements == 0;
}

static enum opaq_status run_batch(struct comparing *comparing, int threads, struct opaq_pool *pool,
                                  bool *is_stopped, struct opaq_error *error) {
    const struct opaq_parallel parallel = opaq_pool_parallel(pool);
    const struct opaq_body body = {work, comparing};
    atomic_store(&comparing->next, 0);
    parallel.run(parallel.context, threads, &body);
    for (int i = 0; i < threads; ++i) {
        if (comparing->workers[i].status != OPAQ_OK) {
            *error = comparing->workers[i].error;
            return error->status;
        }
    }
    *is_stopped = interrupt_seen();
    return *is_stopped ? opaq_fail(error, OPAQ_ERROR_SYSTEM, "interrupted") : OPAQ_OK;
}

static enum opaq_status compare_all(struct comparing *comparing, int threads, struct opaq_pool *pool,
                                    struct comparison *results, bool *is_stopped, struct opaq_error *error) {
    const struct weight_pairs *const pairs = comparing->pairs;
    const size_t capacity = (size_t)threads * PIECES_PER_THREAD;
    struct error_sums *const sums = alloc_array(1, sizeof *sums);
    struct place place = {0};
    size_t done = 0; /* pairs whose result is final */
    enum opaq_status status = OPAQ_OK;
    error_sums_clear(sums);
    do {
        comparing->count = 0;
        while (comparing->count < capacity && next_piece(pairs, &place, &comparing->pieces[comparing->count])) {
            ++comparing->count;
        }
        status = run_batch(comparing, threads, pool, is_stopped, error);
        for (size_t i = 0; i < comparing->count && status == OPAQ_OK; ++i) {
            const struct piece *const piece = &comparing->pieces[i];
            for (; done < piece->pair; ++done) {
                finish_pair(sums, &results[done]);
                error_sums_clear(sums);
            }
            error_sums_join(sums, &piece->sums);
            results[piece->pair].different_bytes += piece->different_bytes;
        }
    } while (comparing->count != 0 && status == OPAQ_OK);
    for (; done < pairs->count && status == OPAQ_OK; ++done) {
        finish_pair(sums, &results[done]);
        error_sums_clear(sums);
    }
    free(sums);
    return status;
}

enum opaq_status compare_weights(const struct weight_pairs *pairs, struct opaq_pool *pool,
                                 struct progress *progress, struct comparison **results, bool *is_stopped,
                                 struct opaq_error *error) {
    const int threads = opaq_pool_threads(pool);
    struct comparing comparing = {.pairs = pairs, .progress = progress};
    comparing.pieces = alloc_array((size_t)threads * PIECES_PER_THREAD, sizeof *comparing.pieces);
    comparing.workers = alloc_array((size_t)threads, sizeof *comparing.workers);
    *is_stopped = false;
    *results = alloc_array(pairs->count, sizeof **results);
    for (size_t i = 0; i < pairs->count; ++i) {
        (*results)[i].pair = &pairs->items[i];
    }
    const enum opaq_status status = compare_all(&comparing, threads, pool, *results, is_stopped, error);
    for (int i = 0; i < threads; ++i) {
        row_memory_free(&comparing.workers[i].original);
        row_memory_free(&comparing.workers[i].quantized);
    }
    free(comparing.workers);
    free(comparing.pieces);
    if (status != OPAQ_OK) {
        free(*results);
        *results = NULL;
    }
    return status;
}
