/* cli/write/plan_run.c: see plan_run.h. */
#include "cli/write/plan_run.h"

#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "cli/console/interrupt.h"
#include "cli/console/progress.h"
#include "cli/write/nonfinite.h"
#include "cli/write/output_file.h"
#include "cli/write/shared_scale.h"
#include "opaq/stored.h"

enum {
    PIECE_ELEMENTS = 1 << 20, /* at most, and fewer where there are many threads */
    ALL_ELEMENTS = 5 << 20,   /* of all pieces under way */
    LEAST_ELEMENTS = 1 << 16,
    BATCH_BYTES = 512 << 20 /* amaxes are found for so much of the source before it is read again */
};

enum piece_kind { PIECE_HEADER, PIECE_COPY, PIECE_GIVEN, PIECE_AMAX, PIECE_ROWS };

struct piece {
    enum piece_kind kind;
    size_t index;  /* of the entry, or of the target */
    int64_t first; /* byte or row */
    int64_t count;
    uint64_t progress;
};

struct pieces {
    struct piece *items;
    size_t count;
    size_t capacity;
};

struct run {
    struct plan *plan;
    struct plan_file *file;
    struct output_file *output;
    struct progress *progress;
    const struct opaq_parallel *parallel;
    int threads;
    int64_t piece_elements;
    bool allows_nonfinite;
    /* for the pieces under way */
    const struct pieces *pieces;
    atomic_size_t next;
    atomic_bool has_failed;
    pthread_mutex_t lock; /* of the error, of the sets' amaxes and of what is counted */
    struct opaq_error error;
};

struct worker {
    struct row_memory in;
    struct row_memory out;
};

/* ---- one piece ---- */

static enum opaq_status copy_bytes(struct run *run, const struct piece *piece, struct worker *worker,
                                   struct opaq_error *error) {
    const struct plan_entry *const entry = &run->file->entries[piece->index];
    void *const bytes = row_memory_take(&worker->in, 0, (size_t)piece->count);
    const enum opaq_status status = model_read(run->plan->weights->model, entry->copied, (uint64_t)piece->first,
                                               bytes, (size_t)piece->count, error);
    return status != OPAQ_OK ? status
                             : output_write(run->output, entry->begin + (uint64_t)piece->first, bytes,
                                            (size_t)piece->count, error);
}

/* Names the tensor of the source and the place in it. */
static enum opaq_status refuse_nonfinite(const struct weight_part *part, int64_t row, int64_t column,
                                         const char *kind, struct opaq_error *error) {
    const struct weight *const weight = part->weight;
    struct text expert = {0};
    if (weight->stack > 1) {
        text_print(&expert, "matrix %" PRId64 ", ", part->matrix);
    }
    const enum opaq_status status =
        opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                  "%.160s has %s at %srow %" PRId64 ", column %" PRId64
                  ": it would spoil all weights that share its scale; --allow-nonfinite quantizes them anyway",
                  weight->data->tensor->name, kind, text_get(&expert),
                  part->is_turned ? column : part->first + row, part->is_turned ? part->first + row : column);
    text_free(&expert);
    return status;
}

/* Refuses or counts what is not finite in the rows from `first` on. */
static enum opaq_status check_finite(struct run *run, struct plan_target *target, int64_t first,
                                     const struct opaq_view *rows, struct opaq_error *error) {
    int64_t index = 0;
    const char *kind = NULL;
    const uint64_t count = nonfinite_count(rows, &index, &kind);
    const int64_t columns = target->part.columns;
    if (count == 0) {
        return OPAQ_OK;
    }
    if (!run->allows_nonfinite) {
        return refuse_nonfinite(&target->part, first + index / columns, index % columns, kind, error);
    }
    pthread_mutex_lock(&run->lock);
    target->nonfinite += count;
    pthread_mutex_unlock(&run->lock);
    return OPAQ_OK;
}

/* A scale of the whole tensor is that of its finite values. */
static enum opaq_status find_amax(struct run *run, const struct piece *piece, struct worker *worker,
                                  struct opaq_error *error) {
    struct plan_target *const target = &run->plan->targets[piece->index];
    struct opaq_spec spec = target->spec;
    spec.options &= (uint16_t)~OPAQ_GLOBAL;
    struct opaq_view rows;
    enum opaq_status status = part_rows(run->plan->weights->model, &target->part, piece->first, piece->count,
                                        &worker->in, &rows, error);
    float amax = 0;
    if (status == OPAQ_OK) {
        status = opaq_amax(&rows, &spec, OPAQ_ROWWISE, NULL, &amax, 1, error);
    }
    if (status == OPAQ_OK && !isfinite(amax)) {
        if (!run->allows_nonfinite) {
            return check_finite(run, target, piece->first, &rows, error);
        }
        nonfinite_clear(&rows);
        status = opaq_amax(&rows, &spec, OPAQ_ROWWISE, NULL, &amax, 1, error);
    }
    if (status == OPAQ_OK) {
        struct plan_set *const set = &run->plan->sets[target->set];
        pthread_mutex_lock(&run->lock);
        set->amax = amax > set->amax ? amax : set->amax;
        pthread_mutex_unlock(&run->lock);
    }
    return status;
}

/* Rows of a matrix that is written transposed: each column of them goes to a place of its own. */
static enum opaq_status write_turned(struct run *run, const struct plan_target *target,
                                     const struct piece *piece, const void *rows, struct worker *worker,
                                     struct opaq_error *error) {
    const int64_t columns = target->part.columns;
    const uint64_t bytes = target->data_row_bytes / (uint64_t)columns; /* of an element */
    const uint64_t strip = (uint64_t)piece->count * bytes;
    const uint64_t begin = run->file->entries[target->data.entry].begin + target->data.offset;
    char *const turned = row_memory_take(&worker->out, 0, (size_t)(strip * (uint64_t)columns));
    turn_elements(rows, piece->count, columns, (int64_t)bytes, turned);
    enum opaq_status status = OPAQ_OK;
    for (int64_t column = 0; column < columns && status == OPAQ_OK; ++column) {
        const uint64_t place = (uint64_t)(column * target->part.rows + piece->first) * bytes;
        status = output_write(run->output, begin + place, turned + (uint64_t)column * strip, strip, error);
    }
    return status;
}

static enum opaq_status decode_rows(struct run *run, const struct plan_target *target,
                                    const struct piece *piece, struct worker *worker,
                                    struct opaq_error *error) {
    struct opaq_view rows;
    const enum opaq_status status =
        weight_decoded(run->plan->weights->model, target->part.weight, target->part.matrix, piece->first,
                       piece->count, target->dtype, &worker->in, &rows, error);
    if (status != OPAQ_OK) {
        return status;
    }
    if (target->is_turned_over) {
        return write_turned(run, target, piece, rows.buffer[0].data, worker, error);
    }
    return output_write(run->output,
                        run->file->entries[target->data.entry].begin + target->data.offset +
                            (uint64_t)piece->first * target->data_row_bytes,
                        rows.buffer[0].data, (size_t)((uint64_t)piece->count * target->data_row_bytes), error);
}

static size_t tensor_bytes(const struct opaq_tensor *tensor) {
    size_t bytes = tensor->dtype == OPAQ_DTYPE_F32 ? 4 : 1;
    for (int i = 0; i < tensor->rank; ++i) {
        bytes *= (size_t)tensor->shape[i];
    }
    return bytes;
}

/* The codes and scales of `view`, which holds rows from piece->first on, to their places. */
static enum opaq_status write_rows(struct run *run, const struct plan_target *target, const struct piece *piece,
                                   const struct opaq_view *view, struct worker *worker, float global,
                                   struct opaq_error *error) {
    struct opaq_stored stored;
    enum opaq_status status = opaq_stored_describe(&view->proto, piece->count, &stored, error);
    if (status != OPAQ_OK) {
        return status;
    }
    const size_t data_bytes = tensor_bytes(&stored.data);
    const size_t scale_bytes = tensor_bytes(&stored.scale);
    float kept = 0;
    stored.data.data = row_memory_take(&worker->out, 1, data_bytes);
    stored.scale.data = row_memory_take(&worker->out, 2, scale_bytes);
    stored.global.data = target->spec.format == OPAQ_NVFP4 ? &kept : NULL;
    status = opaq_stored_export(view, 0, piece->count, &stored, error);
    const struct plan_entry *const entries = run->file->entries;
    const int64_t block_rows = opaq_format_row(target->row->format)->block_rows;
    if (status == OPAQ_OK) {
        status = output_write(run->output,
                              entries[target->data.entry].begin + target->data.offset +
                                  (uint64_t)piece->first * target->data_row_bytes,
                              stored.data.data, data_bytes, error);
    }
    if (status == OPAQ_OK && (block_rows != 0 || piece->first == 0)) {
        const uint64_t scale_row = block_rows == 0 ? 0 : (uint64_t)(piece->first / block_rows);
        status = output_write(run->output,
                              entries[target->scale.entry].begin + target->scale.offset +
                                  scale_row * target->scale_row_bytes,
                              stored.scale.data, scale_bytes, error);
    }
    if (status == OPAQ_OK && *target->row->global != '\0' && piece->first == 0) {
        status = output_write(run->output, entries[target->global.entry].begin + target->global.offset, &global,
                              sizeof global, error);
    }
    return status;
}

static enum opaq_status quantize_rows(struct run *run, struct plan_target *target, const struct piece *piece,
                                      struct worker *worker, struct opaq_error *error) {
    struct opaq_view x;
    enum opaq_status status =
        part_rows(run->plan->weights->model, &target->part, piece->first, piece->count, &worker->in, &x, error);
    struct opaq_proto proto;
    size_t bytes = 0;
    /* that of a set was looked at with the amaxes */
    if (status == OPAQ_OK && (target->set == NO_SET || run->allows_nonfinite)) {
        status = check_finite(run, target, piece->first, &x, error);
    }
    if (status == OPAQ_OK) {
        status = opaq_proto_make(x.proto.shape, 2, (enum opaq_element)x.proto.dtype, &target->spec,
                                 x.proto.device, &proto, error);
    }
    if (status == OPAQ_OK) {
        status = opaq_view_bind_bytes(&proto, &bytes, error);
    }
    struct opaq_view view;
    if (status == OPAQ_OK) {
        status = opaq_view_bind(&proto, row_memory_take(&worker->out, 0, bytes), bytes, &view, error);
    }
    struct shared_scale scale = {0};
    if (status == OPAQ_OK && target->set != NO_SET) {
        status = shared_scale_of(&target->spec, target->row, run->plan->sets[target->set].amax, &scale, error);
    }
    if (status == OPAQ_OK) {
        const struct opaq_quantize_args arguments = {.amax_rowwise =
                                                         target->set == NO_SET ? NULL : &scale.given};
        status = opaq_quantize(&x, &arguments, &view, error);
    }
    return status != OPAQ_OK ? status : write_rows(run, target, piece, &view, worker, scale.stored, error);
}

static enum opaq_status do_piece(struct run *run, const struct piece *piece, struct worker *worker,
                                 struct opaq_error *error) {
    const struct plan_entry *const entries = run->file->entries;
    switch (piece->kind) {
    case PIECE_HEADER:
        return output_write(run->output, 0, run->file->header.bytes, run->file->header.length, error);
    case PIECE_COPY:
        return copy_bytes(run, piece, worker, error);
    case PIECE_GIVEN:
        return output_write(run->output, entries[piece->index].begin, entries[piece->index].given,
                            entries[piece->index].bytes, error);
    case PIECE_AMAX:
        return find_amax(run, piece, worker, error);
    case PIECE_ROWS:
        break;
    }
    struct plan_target *const target = &run->plan->targets[piece->index];
    return target->row == NULL ? decode_rows(run, target, piece, worker, error)
                               : quantize_rows(run, target, piece, worker, error);
}

/* ---- all of them ---- */

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
    (void)begin; /* one of as many as there are threads */
    (void)end;
    for (size_t i = atomic_fetch_add(&run->next, 1); i < run->pieces->count && !atomic_load(&run->has_failed);
         i = atomic_fetch_add(&run->next, 1)) {
        struct opaq_error error = {OPAQ_OK, ""};
        if (interrupt_seen()) {
            opaq_fail(&error, OPAQ_ERROR_SYSTEM,
                      "stopped; what was half written is removed, and running it again "
                      "goes on with the files that are missing");
            fail(run, &error);
        } else if (do_piece(run, &run->pieces->items[i], &worker, &error) != OPAQ_OK) {
            fail(run, &error);
        } else {
            progress_add(run->progress, run->pieces->items[i].progress);
        }
    }
    row_memory_free(&worker.in);
    row_memory_free(&worker.out);
}

/* As many threads as there is memory for: pieces of wide matrices in square blocks cannot be made small. */
static int64_t workers(const struct run *run, const struct pieces *pieces) {
    int64_t largest = 0;
    for (size_t i = 0; i < pieces->count; ++i) {
        const struct piece *const piece = &pieces->items[i];
        const bool has_rows = piece->kind == PIECE_AMAX || piece->kind == PIECE_ROWS;
        const int64_t elements = has_rows ? piece->count * run->plan->targets[piece->index].part.columns : 0;
        largest = elements > largest ? elements : largest;
    }
    const int64_t fitting = largest < 1 ? run->threads : ALL_ELEMENTS / largest;
    return fitting < 1 ? 1 : fitting < run->threads ? fitting : run->threads;
}

static enum opaq_status run_pieces(struct run *run, const struct pieces *pieces, struct opaq_error *error) {
    run->pieces = pieces;
    atomic_store(&run->next, 0);
    const struct opaq_body body = {work, run};
    run->parallel->run(run->parallel->context, workers(run, pieces), &body);
    if (atomic_load(&run->has_failed)) {
        return opaq_fail(error, run->error.status, "%s", run->error.text);
    }
    return OPAQ_OK;
}

static void add_piece(struct pieces *pieces, struct piece piece) {
    pieces->items = grow_array(pieces->items, pieces->count, &pieces->capacity, sizeof *pieces->items);
    pieces->items[pieces->count++] = piece;
}

static uint64_t source_bytes(const struct plan_target *target, int64_t rows) {
    const struct weight *const weight = target->part.weight;
    const uint64_t elements = (uint64_t)(weight->stack * weight->rows) * (uint64_t)weight->columns;
    const uint64_t all = weight->data->tensor->bytes;
    return elements == 0
               ? 0
               : (uint64_t)((double)rows * (double)target->part.columns * (double)all / (double)elements);
}

/* Rows that only go together: those of a block of the source, or of what it becomes. */
static int64_t rows_together(const struct plan_target *target) {
    const struct opaq_layout_row *const from = target->part.weight->row;
    const struct opaq_layout_row *const to = target->row;
    const bool has_square =
        (from != NULL && from->format == OPAQ_FP8BLK2) || (to != NULL && to->format == OPAQ_FP8BLK2);
    enum { SQUARE_ROWS = 128 };
    return has_square ? SQUARE_ROWS : 1;
}

/* What is read twice counts half each time. */
static void add_rows(const struct run *run, struct pieces *pieces, enum piece_kind kind, size_t index) {
    const struct plan_target *const target = &run->plan->targets[index];
    const int64_t columns = target->part.columns < 1 ? 1 : target->part.columns;
    const int64_t fitting = run->piece_elements / columns;
    const int64_t together = rows_together(target);
    const int64_t step = fitting < together ? together : fitting / together * together;
    for (int64_t row = 0; row < target->part.rows; row += step) {
        const int64_t count = target->part.rows - row < step ? target->part.rows - row : step;
        const uint64_t bytes = source_bytes(target, count);
        const uint64_t progress =
            target->set == NO_SET ? bytes : (kind == PIECE_AMAX ? bytes / 2 : bytes - bytes / 2);
        add_piece(pieces, (struct piece){kind, index, row, count, progress});
    }
}

static void add_amaxes(struct run *run, struct pieces *pieces, size_t target) {
    const size_t number = run->plan->targets[target].set;
    if (number == NO_SET || run->plan->sets[number].is_known) {
        return;
    }
    struct plan_set *const set = &run->plan->sets[number];
    set->is_known = true; /* when these pieces are done */
    for (size_t i = 0; i < set->count; ++i) {
        add_rows(run, pieces, PIECE_AMAX, set->targets[i]);
    }
}

/* Targets from `begin` on that belong to the file, up to a batch: first their amaxes, then their rows. */
static enum opaq_status run_batch(struct run *run, size_t file, size_t *begin, struct opaq_error *error) {
    struct pieces amaxes = {0};
    struct pieces rows = {0};
    uint64_t bytes = 0;
    size_t i = *begin;
    for (; i < run->plan->target_count && bytes < BATCH_BYTES; ++i) {
        const struct plan_target *const target = &run->plan->targets[i];
        if (target->file == file) {
            bytes += source_bytes(target, target->part.rows);
            add_amaxes(run, &amaxes, i);
            add_rows(run, &rows, PIECE_ROWS, i);
        }
    }
    *begin = i;
    enum opaq_status status = run_pieces(run, &amaxes, error);
    if (status == OPAQ_OK) {
        status = run_pieces(run, &rows, error);
    }
    free(amaxes.items);
    free(rows.items);
    return status;
}

static enum opaq_status run_entries(struct run *run, struct opaq_error *error) {
    struct pieces pieces = {0};
    add_piece(&pieces, (struct piece){PIECE_HEADER, 0, 0, 0, 0});
    for (size_t i = 0; i < run->file->count; ++i) {
        const struct plan_entry *const entry = &run->file->entries[i];
        if (entry->given != NULL) {
            add_piece(&pieces, (struct piece){PIECE_GIVEN, i, 0, 0, 0});
        }
        const uint64_t step = (uint64_t)run->piece_elements * 2;
        for (uint64_t at = 0; entry->copied != NULL && at < entry->bytes; at += step) {
            const uint64_t count = entry->bytes - at < step ? entry->bytes - at : step;
            add_piece(&pieces, (struct piece){PIECE_COPY, i, (int64_t)at, (int64_t)count, count});
        }
    }
    const enum opaq_status status = run_pieces(run, &pieces, error);
    free(pieces.items);
    return status;
}

static enum opaq_status run_file(struct run *run, size_t number, int folder, const char *path,
                                 struct opaq_error *error) {
    run->file = &run->plan->files[number];
    const struct model *const model = run->plan->weights->model;
    const struct model_file *const source = &model->files[number];
    enum opaq_status status =
        output_open(folder, path, run->file->name, run->file->bytes, source->input.mode, &run->output, error);
    if (status != OPAQ_OK) {
        return status;
    }
    status = run_entries(run, error);
    for (size_t target = 0; target < run->plan->target_count && status == OPAQ_OK;) {
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

/* A file that is written waits for the disk while the next one is computed. */
static enum opaq_status run_files(struct run *run, int folder, const char *path, const bool *is_done,
                                  struct opaq_error *error) {
    struct output_file *written = NULL;
    enum opaq_status status = OPAQ_OK;
    for (size_t i = 0; i < run->plan->file_count && status == OPAQ_OK; ++i) {
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
    /* also after an error: it is whole, and a later run need not make it again */
    const enum opaq_status last =
        written == NULL ? OPAQ_OK : output_commit(written, status == OPAQ_OK ? error : NULL);
    return status != OPAQ_OK ? status : last;
}

static uint64_t work_bytes(const struct plan *plan, const bool *is_done) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < plan->target_count; ++i) {
        bytes +=
            is_done[plan->targets[i].file] ? 0 : source_bytes(&plan->targets[i], plan->targets[i].part.rows);
    }
    for (size_t i = 0; i < plan->file_count; ++i) {
        for (size_t k = 0; k < plan->files[i].count && !is_done[i]; ++k) {
            bytes += plan->files[i].entries[k].copied == NULL ? 0 : plan->files[i].entries[k].bytes;
        }
    }
    return bytes;
}

enum opaq_status plan_run(struct plan *plan, int folder, const char *path, const bool *is_done,
                          const struct run_options *options, struct opaq_error *error) {
    struct opaq_pool *pool = NULL;
    enum opaq_status status = opaq_pool_create(options->threads, &pool, error);
    if (status != OPAQ_OK) {
        return status;
    }
    const struct opaq_parallel parallel = opaq_pool_parallel(pool);
    struct run run = {.plan = plan, .parallel = &parallel, .threads = opaq_pool_threads(pool)};
    run.allows_nonfinite = options->allows_nonfinite;
    const int64_t share = ALL_ELEMENTS / run.threads;
    run.piece_elements = share > PIECE_ELEMENTS   ? PIECE_ELEMENTS
                         : share < LEAST_ELEMENTS ? LEAST_ELEMENTS
                                                  : share;
    pthread_mutex_init(&run.lock, NULL);
    run.progress = progress_begin(options->what, work_bytes(plan, is_done), options->is_quiet);
    status = run_files(&run, folder, path, is_done, error);
    progress_end(run.progress, status == OPAQ_OK);
    pthread_mutex_destroy(&run.lock);
    opaq_pool_destroy(pool);
    return status;
}
