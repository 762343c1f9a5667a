/* cli/write/manifest_write.c: see manifest_write.h. */
#include "cli/write/manifest_write.h"

#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli_try.h"
#include "cli/console/interrupt.h"
#include "cli/console/progress.h"
#include "cli/write/nonfinite.h"
#include "cli/write/output_file.h"
#include "cli/write/shared_scale.h"
#include "opaq/stored.h"

enum {
    CHUNK_ELEMENTS = 1 << 20, /* at most; fewer with many threads */
    ALL_ELEMENTS = 5 << 20,   /* of all chunks in progress */
    LEAST_ELEMENTS = 1 << 16,
    BATCH_BYTES = 512 << 20 /* bytes of the source whose amaxes are computed before it is read again */
};

enum chunk_kind { CHUNK_HEADER, CHUNK_COPY, CHUNK_GIVEN, CHUNK_AMAX, CHUNK_ROWS };

struct chunk {
    enum chunk_kind kind;
    size_t index;  /* of the entry, or of the target */
    int64_t first; /* byte or row */
    int64_t count;
    uint64_t progress;
};

struct chunks {
    struct chunk *items;
    size_t count;
    size_t capacity;
};

struct run {
    struct manifest *manifest;
    struct manifest_file *file;
    struct output_file *output;
    struct progress *progress;
    const struct opaq_parallel *parallel;
    int threads;
    int64_t chunk_elements;
    bool allows_nonfinite;
    /* for the chunks in progress */
    const struct chunks *chunks;
    atomic_size_t next;
    atomic_bool has_failed;
    pthread_mutex_t lock; /* of error, sets' amaxes and counters */
    struct opaq_error error;
};

struct worker {
    struct row_memory in;
    struct row_memory out;
};

/* ---- one chunk ---- */

static enum opaq_status copy_bytes(struct run *run, const struct chunk *chunk, struct worker *worker,
                                   struct opaq_error *error) {
    const struct manifest_entry *const entry = &run->file->entries[chunk->index];
    void *const bytes = row_memory_take(&worker->in, 0, (size_t)chunk->count);
    CLI_TRY(model_read(run->manifest->weights->model, entry->copied, (uint64_t)chunk->first, bytes,
                       (size_t)chunk->count, error));
    return output_write(run->output, entry->begin + (uint64_t)chunk->first, bytes, (size_t)chunk->count, error);
}

/* The message names the tensor of the source, row and column. */
static enum opaq_status refuse_nonfinite(const struct weight_slice *slice, int64_t row, int64_t column,
                                         const char *kind, struct opaq_error *error) {
    const struct weight *const weight = slice->weight;
    struct text expert = {0};
    if (weight->stack > 1) {
        text_print(&expert, "matrix %" PRId64 ", ", slice->matrix);
    }
    const enum opaq_status status = opaq_fail(
        error, OPAQ_ERROR_ARGUMENT,
        "%.160s has %s at %srow %" PRId64 ", column %" PRId64
        ": it would spoil all weights that share its scale; --allow-nonfinite quantizes them anyway",
        weight->data->tensor->name, kind, text_get(&expert), slice->is_transposed ? column : slice->first + row,
        slice->is_transposed ? slice->first + row : column);
    text_free(&expert);
    return status;
}

/* Rejects or counts NaNs and infinities; `rows` start at row `first`. */
static enum opaq_status check_finite(struct run *run, struct manifest_target *target, int64_t first,
                                     const struct opaq_view *rows, struct opaq_error *error) {
    int64_t index = 0;
    const char *kind = NULL;
    const uint64_t count = nonfinite_count(rows, &index, &kind);
    const int64_t columns = target->slice.columns;
    if (count == 0) {
        return OPAQ_OK;
    }
    if (!run->allows_nonfinite) {
        return refuse_nonfinite(&target->slice, first + index / columns, index % columns, kind, error);
    }
    pthread_mutex_lock(&run->lock);
    target->nonfinite += count;
    pthread_mutex_unlock(&run->lock);
    return OPAQ_OK;
}

/* The scale of a whole tensor is that of its finite values. */
static enum opaq_status find_amax(struct run *run, const struct chunk *chunk, struct worker *worker,
                                  struct opaq_error *error) {
    struct manifest_target *const target = &run->manifest->targets[chunk->index];
    struct opaq_spec spec = target->spec;
    spec.options &= (uint16_t)~OPAQ_GLOBAL;
    struct opaq_view rows;
    float amax = 0;
    CLI_TRY(weight_slice_rows(run->manifest->weights->model, &target->slice, chunk->first, chunk->count,
                              &worker->in, &rows, error));
    CLI_TRY(opaq_amax(&rows, &spec, OPAQ_ROWWISE, NULL, &amax, 1, error));
    if (!isfinite(amax)) {
        if (!run->allows_nonfinite) {
            return check_finite(run, target, chunk->first, &rows, error);
        }
        nonfinite_clear(&rows);
        CLI_TRY(opaq_amax(&rows, &spec, OPAQ_ROWWISE, NULL, &amax, 1, error));
    }
    struct manifest_set *const set = &run->manifest->sets[target->set];
    pthread_mutex_lock(&run->lock);
    set->amax = amax > set->amax ? amax : set->amax;
    pthread_mutex_unlock(&run->lock);
    return OPAQ_OK;
}

/* Writes rows of a matrix that is stored transposed, column by column. */
static enum opaq_status write_transposed(struct run *run, const struct manifest_target *target,
                                         const struct chunk *chunk, const void *rows, struct worker *worker,
                                         struct opaq_error *error) {
    const int64_t columns = target->slice.columns;
    const uint64_t bytes = target->data_row_bytes / (uint64_t)columns; /* of one element */
    const uint64_t column_bytes = (uint64_t)chunk->count * bytes;
    const uint64_t begin = run->file->entries[target->data.entry].begin + target->data.offset;
    char *const transposed = row_memory_take(&worker->out, 0, (size_t)(column_bytes * (uint64_t)columns));
    transpose_elements(rows, chunk->count, columns, (int64_t)bytes, transposed);
    for (int64_t column = 0; column < columns; ++column) {
        const uint64_t offset = (uint64_t)(column * target->slice.rows + chunk->first) * bytes;
        CLI_TRY(output_write(run->output, begin + offset, transposed + (uint64_t)column * column_bytes,
                             column_bytes, error));
    }
    return OPAQ_OK;
}

static enum opaq_status decode_rows(struct run *run, const struct manifest_target *target,
                                    const struct chunk *chunk, struct worker *worker,
                                    struct opaq_error *error) {
    struct opaq_view rows;
    CLI_TRY(weight_decoded(run->manifest->weights->model, target->slice.weight, target->slice.matrix,
                           chunk->first, chunk->count, target->dtype, &worker->in, &rows, error));
    if (target->is_written_transposed) {
        return write_transposed(run, target, chunk, rows.buffer[0].data, worker, error);
    }
    return output_write(run->output,
                        run->file->entries[target->data.entry].begin + target->data.offset +
                            (uint64_t)chunk->first * target->data_row_bytes,
                        rows.buffer[0].data, (size_t)((uint64_t)chunk->count * target->data_row_bytes), error);
}

static size_t tensor_bytes(const struct opaq_tensor *tensor) {
    size_t bytes = tensor->dtype == OPAQ_DTYPE_F32 ? 4 : 1;
    for (int i = 0; i < tensor->rank; ++i) {
        bytes *= (size_t)tensor->shape[i];
    }
    return bytes;
}

/* Writes the codes and scales of `view`, which holds the rows of the chunk. */
static enum opaq_status write_rows(struct run *run, const struct manifest_target *target,
                                   const struct chunk *chunk, const struct opaq_view *view,
                                   struct worker *worker, float global, struct opaq_error *error) {
    struct opaq_stored stored;
    CLI_TRY(opaq_stored_describe(&view->proto, chunk->count, &stored, error));
    const size_t data_bytes = tensor_bytes(&stored.data);
    const size_t scale_bytes = tensor_bytes(&stored.scale);
    float unused = 0; /* `global` is that of the set */
    stored.data.data = row_memory_take(&worker->out, 1, data_bytes);
    stored.scale.data = row_memory_take(&worker->out, 2, scale_bytes);
    stored.global.data = target->spec.format == OPAQ_NVFP4 ? &unused : NULL;
    CLI_TRY(opaq_stored_export(view, 0, chunk->count, &stored, error));

    const struct manifest_entry *const entries = run->file->entries;
    const int64_t block_rows = opaq_format_row(target->scheme->format)->block_rows;
    CLI_TRY(output_write(run->output,
                         entries[target->data.entry].begin + target->data.offset +
                             (uint64_t)chunk->first * target->data_row_bytes,
                         stored.data.data, data_bytes, error));
    if (block_rows != 0 || chunk->first == 0) {
        const uint64_t scale_row = block_rows == 0 ? 0 : (uint64_t)(chunk->first / block_rows);
        CLI_TRY(output_write(run->output,
                             entries[target->scale.entry].begin + target->scale.offset +
                                 scale_row * target->scale_row_bytes,
                             stored.scale.data, scale_bytes, error));
    }
    if (*target->scheme->global != '\0' && chunk->first == 0) {
        CLI_TRY(output_write(run->output, entries[target->global.entry].begin + target->global.offset, &global,
                             sizeof global, error));
    }
    return OPAQ_OK;
}

static enum opaq_status quantize_rows(struct run *run, struct manifest_target *target,
                                      const struct chunk *chunk, struct worker *worker,
                                      struct opaq_error *error) {
    struct opaq_view x;
    CLI_TRY(weight_slice_rows(run->manifest->weights->model, &target->slice, chunk->first, chunk->count,
                              &worker->in, &x, error));
    /* find_amax has checked those of a set */
    if (target->set == NO_SET || run->allows_nonfinite) {
        CLI_TRY(check_finite(run, target, chunk->first, &x, error));
    }
    struct opaq_proto proto;
    struct opaq_view view;
    size_t bytes = 0;
    CLI_TRY(opaq_proto_make(x.proto.shape, 2, (enum opaq_element)x.proto.dtype, &target->spec, x.proto.device,
                            &proto, error));
    CLI_TRY(opaq_view_bind_bytes(&proto, &bytes, error));
    CLI_TRY(opaq_view_bind(&proto, row_memory_take(&worker->out, 0, bytes), bytes, &view, error));
    struct shared_scale scale = {0};
    struct opaq_quantize_args arguments = {0};
    if (target->set != NO_SET) {
        CLI_TRY(shared_scale_of(&target->spec, target->scheme, run->manifest->sets[target->set].amax, &scale,
                                error));
        arguments.amax_rowwise = &scale.given;
    }
    CLI_TRY(opaq_quantize(&x, &arguments, NULL, &view, error));
    return write_rows(run, target, chunk, &view, worker, scale.stored, error);
}

static enum opaq_status do_chunk(struct run *run, const struct chunk *chunk, struct worker *worker,
                                 struct opaq_error *error) {
    const struct manifest_entry *const entries = run->file->entries;
    switch (chunk->kind) {
    case CHUNK_HEADER:
        return output_write(run->output, 0, run->file->header.bytes, run->file->header.length, error);
    case CHUNK_COPY:
        return copy_bytes(run, chunk, worker, error);
    case CHUNK_GIVEN:
        return output_write(run->output, entries[chunk->index].begin, entries[chunk->index].given,
                            entries[chunk->index].bytes, error);
    case CHUNK_AMAX:
        return find_amax(run, chunk, worker, error);
    case CHUNK_ROWS:
        break;
    }
    struct manifest_target *const target = &run->manifest->targets[chunk->index];
    return target->scheme == NULL ? decode_rows(run, target, chunk, worker, error)
                                  : quantize_rows(run, target, chunk, worker, error);
}

/* ---- all chunks ---- */

static void fail(struct run *run, const struct opaq_error *error) {
    pthread_mutex_lock(&run->lock);
    if (!atomic_exchange(&run->has_failed, true)) {
        run->error = *error;
    }
    pthread_mutex_unlock(&run->lock);
}

static void work(void *argument, int64_t begin, int64_t end) {
    struct run *const run = argument;
    struct worker worker = {0};
    (void)begin; /* called once for each thread */
    (void)end;
    for (size_t i = atomic_fetch_add(&run->next, 1); i < run->chunks->count && !atomic_load(&run->has_failed);
         i = atomic_fetch_add(&run->next, 1)) {
        struct opaq_error error = {OPAQ_OK, ""};
        if (interrupt_seen()) {
            opaq_fail(&error, OPAQ_ERROR_SYSTEM,
                      "stopped; the partial file is removed, and running the command again "
                      "continues with the missing files");
            fail(run, &error);
        } else if (do_chunk(run, &run->chunks->items[i], &worker, &error) != OPAQ_OK) {
            fail(run, &error);
        } else {
            progress_add(run->progress, run->chunks->items[i].progress);
        }
    }
    row_memory_free(&worker.in);
    row_memory_free(&worker.out);
}

/* Number of threads that memory allows: chunks of wide matrices in square blocks cannot be small. */
static int64_t workers(const struct run *run, const struct chunks *chunks) {
    int64_t largest = 0;
    for (size_t i = 0; i < chunks->count; ++i) {
        const struct chunk *const chunk = &chunks->items[i];
        const bool has_rows = chunk->kind == CHUNK_AMAX || chunk->kind == CHUNK_ROWS;
        const int64_t elements =
            has_rows ? chunk->count * run->manifest->targets[chunk->index].slice.columns : 0;
        largest = elements > largest ? elements : largest;
    }
    const int64_t fitting = largest < 1 ? run->threads : ALL_ELEMENTS / largest;
    return fitting < 1 ? 1 : fitting < run->threads ? fitting : run->threads;
}

static enum opaq_status run_chunks(struct run *run, const struct chunks *chunks, struct opaq_error *error) {
    run->chunks = chunks;
    atomic_store(&run->next, 0);
    const struct opaq_body body = {work, run};
    run->parallel->run(run->parallel->context, workers(run, chunks), &body);
    if (atomic_load(&run->has_failed)) {
        return opaq_fail(error, run->error.status, "%s", run->error.text);
    }
    return OPAQ_OK;
}

static void add_chunk(struct chunks *chunks, struct chunk chunk) {
    chunks->items = grow_array(chunks->items, chunks->count, &chunks->capacity, sizeof *chunks->items);
    chunks->items[chunks->count++] = chunk;
}

static uint64_t source_bytes(const struct manifest_target *target, int64_t rows) {
    const struct weight *const weight = target->slice.weight;
    const uint64_t elements = (uint64_t)(weight->stack * weight->rows) * (uint64_t)weight->columns;
    const uint64_t all = weight->data->tensor->bytes;
    return elements == 0
               ? 0
               : (uint64_t)((double)rows * (double)target->slice.columns * (double)all / (double)elements);
}

/* Rows that must be in one chunk: those of a block of the source or of the result. */
static int64_t rows_together(const struct manifest_target *target) {
    const struct opaq_layout_row *const from = target->slice.weight->scheme;
    const struct opaq_layout_row *const to = target->scheme;
    const bool has_square =
        (from != NULL && from->format == OPAQ_FP8BLK2) || (to != NULL && to->format == OPAQ_FP8BLK2);
    enum { SQUARE_ROWS = 128 };
    return has_square ? SQUARE_ROWS : 1;
}

/* Rows that are read twice count half each time. */
static void add_rows(const struct run *run, struct chunks *chunks, enum chunk_kind kind, size_t index) {
    const struct manifest_target *const target = &run->manifest->targets[index];
    const int64_t columns = target->slice.columns < 1 ? 1 : target->slice.columns;
    const int64_t fitting = run->chunk_elements / columns;
    const int64_t together = rows_together(target);
    const int64_t step = fitting < together ? together : fitting / together * together;
    for (int64_t row = 0; row < target->slice.rows; row += step) {
        const int64_t count = target->slice.rows - row < step ? target->slice.rows - row : step;
        const uint64_t bytes = source_bytes(target, count);
        const uint64_t progress =
            target->set == NO_SET ? bytes : (kind == CHUNK_AMAX ? bytes / 2 : bytes - bytes / 2);
        add_chunk(chunks, (struct chunk){kind, index, row, count, progress});
    }
}

static void add_amaxes(struct run *run, struct chunks *chunks, size_t target) {
    const size_t number = run->manifest->targets[target].set;
    if (number == NO_SET || run->manifest->sets[number].is_known) {
        return;
    }
    struct manifest_set *const set = &run->manifest->sets[number];
    set->is_known = true; /* once these chunks are done */
    for (size_t i = 0; i < set->count; ++i) {
        add_rows(run, chunks, CHUNK_AMAX, set->targets[i]);
    }
}

/* Runs a batch of targets of the file from `begin` on: first their amaxes, then their rows. */
static enum opaq_status run_batch(struct run *run, size_t file, size_t *begin, struct opaq_error *error) {
    struct chunks amaxes = {0};
    struct chunks rows = {0};
    uint64_t bytes = 0;
    size_t i = *begin;
    for (; i < run->manifest->target_count && bytes < BATCH_BYTES; ++i) {
        const struct manifest_target *const target = &run->manifest->targets[i];
        if (target->file == file) {
            bytes += source_bytes(target, target->slice.rows);
            add_amaxes(run, &amaxes, i);
            add_rows(run, &rows, CHUNK_ROWS, i);
        }
    }
    *begin = i;
    enum opaq_status status = run_chunks(run, &amaxes, error);
    if (status == OPAQ_OK) {
        status = run_chunks(run, &rows, error);
    }
    free(amaxes.items);
    free(rows.items);
    return status;
}

static enum opaq_status run_entries(struct run *run, struct opaq_error *error) {
    struct chunks chunks = {0};
    add_chunk(&chunks, (struct chunk){CHUNK_HEADER, 0, 0, 0, 0});
    for (size_t i = 0; i < run->file->count; ++i) {
        const struct manifest_entry *const entry = &run->file->entries[i];
        if (entry->given != NULL) {
            add_chunk(&chunks, (struct chunk){CHUNK_GIVEN, i, 0, 0, 0});
        }
        const uint64_t step = (uint64_t)run->chunk_elements * 2;
        for (uint64_t at = 0; entry->copied != NULL && at < entry->bytes; at += step) {
            const uint64_t count = entry->bytes - at < step ? entry->bytes - at : step;
            add_chunk(&chunks, (struct chunk){CHUNK_COPY, i, (int64_t)at, (int64_t)count, count});
        }
    }
    const enum opaq_status status = run_chunks(run, &chunks, error);
    free(chunks.items);
    return status;
}

static enum opaq_status run_file(struct run *run, size_t number, int folder, const char *path,
                                 struct opaq_error *error) {
    run->file = &run->manifest->files[number];
    const struct model *const model = run->manifest->weights->model;
    const struct model_file *const source = &model->files[number];
    CLI_TRY(
        output_open(folder, path, run->file->name, run->file->bytes, source->input.mode, &run->output, error));
    enum opaq_status status = run_entries(run, error);
    for (size_t target = 0; target < run->manifest->target_count && status == OPAQ_OK;) {
        status = run_batch(run, number, &target, error);
    }
    if (status == OPAQ_OK) {
        status = input_check(&source->input, model->is_folder ? &model->folder : NULL, source->name, error);
    }
    if (status != OPAQ_OK) {
        output_discard(run->output);
    }
    return status;
}

/* A complete file is flushed to disk while the next one is computed. */
static enum opaq_status run_files(struct run *run, int folder, const char *path, const bool *is_done,
                                  struct opaq_error *error) {
    struct output_file *written = NULL;
    enum opaq_status status = OPAQ_OK;
    for (size_t i = 0; i < run->manifest->file_count && status == OPAQ_OK; ++i) {
        if (is_done[i]) {
            continue;
        }
        status = run_file(run, i, folder, path, error);
        if (status == OPAQ_OK) {
            struct output_file *const before = written;
            written = run->output;
            status = before == NULL ? OPAQ_OK : output_commit(before, error);
        }
    }
    /* also after an error: the file is complete, and a later run need not write it again */
    const enum opaq_status last =
        written == NULL ? OPAQ_OK : output_commit(written, status == OPAQ_OK ? error : NULL);
    return status != OPAQ_OK ? status : last;
}

static uint64_t work_bytes(const struct manifest *manifest, const bool *is_done) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < manifest->target_count; ++i) {
        bytes += is_done[manifest->targets[i].file]
                     ? 0
                     : source_bytes(&manifest->targets[i], manifest->targets[i].slice.rows);
    }
    for (size_t i = 0; i < manifest->file_count; ++i) {
        for (size_t k = 0; k < manifest->files[i].count && !is_done[i]; ++k) {
            bytes += manifest->files[i].entries[k].copied == NULL ? 0 : manifest->files[i].entries[k].bytes;
        }
    }
    return bytes;
}

enum opaq_status manifest_write(struct manifest *manifest, int folder, const char *path, const bool *is_done,
                                const struct run_options *options, struct opaq_error *error) {
    struct opaq_pool *pool = NULL;
    CLI_TRY(opaq_pool_create(options->threads, &pool, error));
    const struct opaq_parallel parallel = opaq_pool_parallel(pool);
    struct run run = {.manifest = manifest, .parallel = &parallel, .threads = opaq_pool_threads(pool)};
    run.allows_nonfinite = options->allows_nonfinite;
    const int64_t share = ALL_ELEMENTS / run.threads;
    run.chunk_elements = share > CHUNK_ELEMENTS   ? CHUNK_ELEMENTS
                         : share < LEAST_ELEMENTS ? LEAST_ELEMENTS
                                                  : share;
    pthread_mutex_init(&run.lock, NULL);
    run.progress = progress_begin(options->what, work_bytes(manifest, is_done), options->is_quiet);
    const enum opaq_status status = run_files(&run, folder, path, is_done, error);
    progress_end(run.progress, status == OPAQ_OK);
    pthread_mutex_destroy(&run.lock);
    opaq_pool_destroy(pool);
    return status;
}
