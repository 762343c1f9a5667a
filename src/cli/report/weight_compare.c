/* cli/report/weight_compare.c: see weight_compare.h. Chunks are processed in batches: each chunk has its own sums,
 * which are added in order when the batch is done. */
#include "cli/report/weight_compare.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli_try.h"
#include "cli/console/interrupt.h"

enum { CHUNK_ELEMENTS = 1 << 20, CHUNK_BYTES = 1 << 22, BLOCK_ROWS = 128, CHUNKS_PER_THREAD = 8 };

struct chunk {
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
    struct chunk *chunks;
    size_t count;
    struct worker *workers;
    atomic_size_t next;
    atomic_bool is_stopping;
};

/* ---- one chunk ---- */

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

static enum opaq_status compare_bytes_of(const struct weight_pairs *pairs, struct chunk *chunk,
                                         struct worker *worker) {
    const struct weight_pair *const pair = &pairs->items[chunk->pair];
    const size_t count = (size_t)chunk->count;
    void *const a = row_memory_take(&worker->original, 0, count);
    void *const b = row_memory_take(&worker->quantized, 0, count);
    const uint64_t first = (uint64_t)chunk->first;
    CLI_TRY(model_read(&pairs->original->model, pair->original.weight->data, first, a, count, &worker->error));
    CLI_TRY(
        model_read(&pairs->quantized->model, pair->quantized.weight->data, first, b, count, &worker->error));
    chunk->different_bytes = count_different(a, b, count);
    return OPAQ_OK;
}

static enum opaq_status compare_rows_of(const struct weight_pairs *pairs, struct chunk *chunk,
                                        struct worker *worker) {
    const struct weight_pair *const pair = &pairs->items[chunk->pair];
    struct weight_slice original = pair->original;
    struct weight_slice quantized = pair->quantized;
    original.matrix += chunk->matrix;
    quantized.matrix += chunk->matrix;
    struct opaq_view original_rows;
    struct opaq_view quantized_rows;
    CLI_TRY(weight_slice_rows(&pairs->original->model, &original, chunk->first, chunk->count, &worker->original,
                              &original_rows, &worker->error));
    CLI_TRY(weight_slice_rows(&pairs->quantized->model, &quantized, chunk->first, chunk->count,
                              &worker->quantized, &quantized_rows, &worker->error));
    const size_t elements = (size_t)(chunk->count * quantized.columns);
    if (pair_is_bytes(pair)) {
        const size_t bytes = elements * (size_t)st_dtype_bits(original.weight->data->tensor->dtype) / 8;
        chunk->different_bytes =
            count_different(original_rows.buffer[0].data, quantized_rows.buffer[0].data, bytes);
    }
    error_sums_add(&chunk->sums, rows_floats(&original_rows, &worker->original),
                   rows_floats(&quantized_rows, &worker->quantized), elements,
                   (chunk->matrix * quantized.rows + chunk->first) * quantized.columns);
    return OPAQ_OK;
}

static uint64_t slice_bytes(const struct weight_slice *slice, uint64_t elements) {
    const uint64_t all = weight_elements(slice->weight);
    return all == 0 ? 0
                    : (uint64_t)((double)weight_bytes(slice->weight) * ((double)elements / (double)all) + 0.5);
}

static uint64_t chunk_bytes(const struct weight_pair *pair, const struct chunk *chunk) {
    const uint64_t elements = (uint64_t)(chunk->count * pair->quantized.columns);
    return chunk->is_bytes ? 2 * (uint64_t)chunk->count
                           : slice_bytes(&pair->original, elements) + slice_bytes(&pair->quantized, elements);
}

/* A worker takes chunks until none is left. */
static void work(void *argument, int64_t begin, int64_t end) {
    struct comparing *const comparing = argument;
    for (int64_t w = begin; w < end; ++w) {
        struct worker *const worker = &comparing->workers[w];
        for (;;) {
            const size_t at = atomic_fetch_add(&comparing->next, 1);
            if (at >= comparing->count || atomic_load(&comparing->is_stopping) || interrupt_seen()) {
                break;
            }
            struct chunk *const chunk = &comparing->chunks[at];
            worker->status = chunk->is_bytes ? compare_bytes_of(comparing->pairs, chunk, worker)
                                             : compare_rows_of(comparing->pairs, chunk, worker);
            if (worker->status != OPAQ_OK) {
                atomic_store(&comparing->is_stopping, true);
                break;
            }
            progress_add(comparing->progress, chunk_bytes(&comparing->pairs->items[chunk->pair], chunk));
        }
    }
}

/* ---- all pairs ---- */

/* Start of the next chunk. */
struct cursor {
    size_t pair;
    int64_t matrix;
    int64_t first;
};

static bool is_block_format(const struct weight *weight) {
    return weight->scheme != NULL && weight->scheme->format == OPAQ_FP8BLK2;
}

static int64_t rows_of_chunk(const struct weight_pair *pair) {
    const int64_t columns = pair->quantized.columns == 0 ? 1 : pair->quantized.columns;
    const int64_t rows = CHUNK_ELEMENTS / columns;
    const bool needs_blocks = is_block_format(pair->original.weight) || is_block_format(pair->quantized.weight);
    return rows >= BLOCK_ROWS ? rows / BLOCK_ROWS * BLOCK_ROWS
           : needs_blocks     ? BLOCK_ROWS
           : rows < 1         ? 1
                              : rows;
}

/* Sets the next chunk and moves on; false at the end. */
static bool next_chunk(const struct weight_pairs *pairs, struct cursor *cursor, struct chunk *chunk) {
    for (; cursor->pair < pairs->count; ++cursor->pair, cursor->matrix = 0, cursor->first = 0) {
        const struct weight_pair *const pair = &pairs->items[cursor->pair];
        if (!is_compared(pair) || pair_elements(pair) == 0) {
            continue;
        }
        const bool is_bytes = !pair_is_floats(pair);
        const int64_t length =
            is_bytes ? (int64_t)pair->original.weight->data->tensor->bytes : pair->quantized.rows;
        const int64_t matrices = is_bytes ? 1 : pair->matrices;
        if (cursor->first >= length) {
            ++cursor->matrix;
            cursor->first = 0;
        }
        if (cursor->matrix >= matrices) {
            continue;
        }
        const int64_t most = is_bytes ? CHUNK_BYTES : rows_of_chunk(pair);
        chunk->pair = cursor->pair;
        chunk->is_bytes = is_bytes;
        chunk->matrix = cursor->matrix;
        chunk->first = cursor->first;
        chunk->count = length - cursor->first < most ? length - cursor->first : most;
        chunk->different_bytes = 0;
        error_sums_clear(&chunk->sums);
        cursor->first += chunk->count;
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
            bytes += slice_bytes(&pair->original, elements) + slice_bytes(&pair->quantized, elements);
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
    const size_t capacity = (size_t)threads * CHUNKS_PER_THREAD;
    struct error_sums *const sums = alloc_array(1, sizeof *sums);
    struct cursor cursor = {0};
    size_t done = 0; /* pairs whose result is final */
    enum opaq_status status = OPAQ_OK;
    error_sums_clear(sums);
    do {
        comparing->count = 0;
        while (comparing->count < capacity &&
               next_chunk(pairs, &cursor, &comparing->chunks[comparing->count])) {
            ++comparing->count;
        }
        status = run_batch(comparing, threads, pool, is_stopped, error);
        for (size_t i = 0; i < comparing->count && status == OPAQ_OK; ++i) {
            const struct chunk *const chunk = &comparing->chunks[i];
            for (; done < chunk->pair; ++done) {
                finish_pair(sums, &results[done]);
                error_sums_clear(sums);
            }
            error_sums_join(sums, &chunk->sums);
            results[chunk->pair].different_bytes += chunk->different_bytes;
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
    comparing.chunks = alloc_array((size_t)threads * CHUNKS_PER_THREAD, sizeof *comparing.chunks);
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
    free(comparing.chunks);
    if (status != OPAQ_OK) {
        free(*results);
        *results = NULL;
    }
    return status;
}
