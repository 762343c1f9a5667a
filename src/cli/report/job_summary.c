/* cli/report/job_summary.c: see job_summary.h. */
#include "cli/report/job_summary.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/console/json_output.h"
#include "cli/console/number_text.h"
#include "cli/console/report_table.h"
#include "cli/console/terminal.h"
#include "cli/report/like_rows.h"

struct made {
    size_t matrices;
    uint64_t parameters;
    uint64_t bytes;
    size_t tensors; /* in the result, copied ones included */
    uint64_t nonfinite;
};

static uint64_t source_tensor_bytes(const struct model *model) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < model->tensor_count; ++i) {
        bytes += model->tensors[i].tensor->bytes;
    }
    return bytes;
}

static struct made made_of(const struct manifest *manifest) {
    struct made made = {.matrices = manifest->target_count};
    for (size_t i = 0; i < manifest->file_count; ++i) {
        made.tensors += manifest->files[i].count;
        for (size_t k = 0; k < manifest->files[i].count; ++k) {
            const struct manifest_entry *const entry = &manifest->files[i].entries[k];
            made.bytes += entry->copied == NULL && entry->given == NULL ? entry->bytes : 0;
        }
    }
    for (size_t i = 0; i < manifest->target_count; ++i) {
        const struct weight_slice *const slice = &manifest->targets[i].slice;
        made.parameters += (uint64_t)slice->rows * (uint64_t)slice->columns;
        made.nonfinite += manifest->targets[i].nonfinite;
    }
    return made;
}

static double share_of(uint64_t parameters, uint64_t all) {
    return all == 0 ? 0.0 : (double)parameters / (double)all;
}

/* ---- tables ---- */

static void print_shares(const struct coverages *coverages) {
    const uint64_t all = coverage_parameters(coverages);
    show(stdout, "%.2f %% of the %.1f million parameters are quantized%s\n",
         100 * share_of(coverages->of[COVERED].parameters, all), (double)all / 1e6,
         coverages->of[COVERED].parameters == all ? "" : "; not quantized:");
    for (int i = COVERED + 1; i < COVERAGE_COUNT; ++i) {
        const struct coverage_tally *const tally = &coverages->of[i];
        if (tally->parameters != 0) {
            show(stdout, "  %5.2f %%  %s: %zu tensor%s, the first %s\n", 100 * share_of(tally->parameters, all),
                 coverage_text((enum coverage)i), tally->weights, tally->weights == 1 ? "" : "s", tally->first);
        }
    }
}

static void print_ignored(const struct module_list *ignored, bool is_dry) {
    const size_t shown = is_dry ? ignored->count : 4;
    show(stdout, "%zu linear module%s not quantized:", ignored->count, ignored->count == 1 ? " is" : "s are");
    for (size_t i = 0; i < ignored->count && i < shown; ++i) {
        show(stdout, "%s %s", i == 0 ? "" : ",", ignored->names[i]);
    }
    show(stdout, "%s\n", ignored->count > shown ? ", ..." : "");
}

static void print_nonfinite(const struct manifest *manifest, uint64_t count) {
    enum { SHOWN = 4 };
    size_t seen = 0;
    show(stdout, "quantized %" PRIu64 " value%s that %s NaN or infinite, in", count, count == 1 ? "" : "s",
         count == 1 ? "is" : "are");
    for (size_t i = 0; i < manifest->target_count; ++i) {
        if (manifest->targets[i].nonfinite != 0 && seen++ < SHOWN) {
            show(stdout, "%s %s", seen == 1 ? "" : ",", manifest->targets[i].slice.name);
        }
    }
    show(stdout, "%s\n", seen > SHOWN ? ", ..." : "");
}

void job_print_summary(const struct checkpoint_job *job, const char *path, bool is_dry) {
    const struct manifest *const manifest = job->manifest;
    const struct made made = made_of(manifest);
    show(stdout, "%s: %zu tensors in %zu file%s, %s (source: %s)\n", path, made.tensors, manifest->file_count,
         manifest->file_count == 1 ? "" : "s", size_text(manifest_tensor_bytes(manifest)).text,
         size_text(source_tensor_bytes(manifest->weights->model)).text);
    if (made.matrices != 0) {
        show(stdout, "%s %zu matrices of %.1f million weights as %s%s%s: %.3f bits a weight\n",
             is_dry ? "would write" : "wrote", made.matrices, (double)made.parameters / 1e6,
             job->scheme == NULL ? "floats" : opaq_format_row(job->scheme->format)->name,
             job->scheme == NULL ? "" : ", ", job->scheme == NULL ? "" : opaq_layout_name(job->scheme->layout),
             made.parameters == 0 ? 0.0 : (double)made.bytes * 8.0 / (double)made.parameters);
    }
    if (job->scheme != NULL) {
        print_shares(&job->coverages);
    }
    if (job->scheme != NULL && job->ignored.count != 0) {
        print_ignored(&job->ignored, is_dry);
    }
    if (made.nonfinite != 0) {
        print_nonfinite(manifest, made.nonfinite);
    }
    for (size_t i = 0; i < job->notes.count; ++i) {
        show(stdout, "note: %s\n", job->notes.names[i]);
    }
}

static void print_files(const struct manifest *manifest) {
    struct report_table *const table = table_begin("file|tensors|size", "lrr");
    for (size_t i = 0; i < manifest->file_count; ++i) {
        table_cell(table, "%s", manifest->files[i].name);
        table_cell(table, "%zu", manifest->files[i].count);
        table_cell(table, "%s", size_text(manifest->files[i].bytes).text);
    }
    table_end(table, stdout);
    show(stdout, "\n");
}

static const char *work_of(const struct manifest_entry *entry) {
    return entry->copied != NULL ? "copy" : entry->given != NULL ? "convert" : "make";
}

static void print_entries(const struct like_item *items, size_t count, const char *const *works,
                          bool is_grouped) {
    struct like_rows rows = like_rows_make(items, count, is_grouped);
    struct report_table *const table = table_begin("tensors|count|work|dtype and shape", "lrll");
    for (size_t i = 0; i < rows.count; ++i) {
        const size_t first = rows.rows[i].first;
        table_cell(table, "%s", rows.rows[i].name);
        table_cell(table, "%zu", rows.rows[i].count);
        table_cell(table, "%s", works[first]);
        table_cell(table, "%s", items[first].detail + strlen(works[first]) + 1);
    }
    table_end(table, stdout);
    show(stdout, "\n");
    like_rows_free(&rows);
}

void job_print_manifest(const struct checkpoint_job *job, bool is_grouped) {
    const size_t most = made_of(job->manifest).tensors;
    struct like_item *const items = alloc_array(most, sizeof *items);
    struct text *const details = alloc_array(most, sizeof *details); /* "copy BF16 [4096, 128]" */
    const char **const works = alloc_array(most, sizeof *works);
    size_t count = 0;
    for (size_t i = 0; i < job->manifest->file_count; ++i) {
        const struct manifest_file *const file = &job->manifest->files[i];
        for (size_t k = 0; k < file->count; ++k) {
            const struct manifest_entry *const entry = &file->entries[k];
            struct st_tensor tensor = {.dtype = entry->dtype, .rank = entry->rank};
            memcpy(tensor.shape, entry->shape, sizeof tensor.shape);
            works[count] = work_of(entry);
            text_print(&details[count], "%s ", works[count]);
            st_describe(&tensor, &details[count]);
            items[count] = (struct like_item){entry->name, details[count].bytes};
            ++count;
        }
    }
    print_files(job->manifest);
    print_entries(items, count, works, is_grouped);
    for (size_t i = 0; i < count; ++i) {
        text_free(&details[i]);
    }
    free(works);
    free(details);
    free(items);
}

/* ---- JSON ---- */

static void add_tally(yyjson_mut_doc *document, yyjson_mut_val *to, const struct coverage_tally *tally,
                      uint64_t all) {
    yyjson_mut_obj_add_uint(document, to, "weights", tally->weights);
    yyjson_mut_obj_add_uint(document, to, "parameters", tally->parameters);
    yyjson_mut_obj_add_real(document, to, "share", share_of(tally->parameters, all));
}

static void add_shares(yyjson_mut_doc *document, yyjson_mut_val *root, const struct coverages *coverages) {
    const uint64_t all = coverage_parameters(coverages);
    yyjson_mut_obj_add_uint(document, root, "parameters", all);
    add_tally(document, yyjson_mut_obj_add_obj(document, root, "quantized"), &coverages->of[COVERED], all);
    yyjson_mut_val *const left = yyjson_mut_obj_add_arr(document, root, "not_quantized");
    for (int i = COVERED + 1; i < COVERAGE_COUNT; ++i) {
        if (coverages->of[i].weights != 0) {
            yyjson_mut_val *const reason = yyjson_mut_arr_add_obj(document, left);
            json_add_text(document, reason, "reason", coverage_name((enum coverage)i));
            add_tally(document, reason, &coverages->of[i], all);
            json_add_text(document, reason, "first", coverages->of[i].first);
        }
    }
}

static void add_nonfinite(yyjson_mut_doc *document, yyjson_mut_val *root, const struct manifest *manifest,
                          uint64_t count) {
    yyjson_mut_val *const found = yyjson_mut_obj_add_obj(document, root, "nonfinite");
    yyjson_mut_obj_add_uint(document, found, "values", count);
    yyjson_mut_val *const weights = yyjson_mut_obj_add_arr(document, found, "weights");
    for (size_t i = 0; i < manifest->target_count; ++i) {
        if (manifest->targets[i].nonfinite != 0) {
            yyjson_mut_val *const weight = yyjson_mut_arr_add_obj(document, weights);
            json_add_text(document, weight, "name", manifest->targets[i].slice.name);
            yyjson_mut_obj_add_uint(document, weight, "values", manifest->targets[i].nonfinite);
        }
    }
}

static void add_names(yyjson_mut_doc *document, yyjson_mut_val *root, const char *key,
                      const struct module_list *list) {
    yyjson_mut_val *const names = yyjson_mut_obj_add_arr(document, root, key);
    for (size_t i = 0; i < list->count; ++i) {
        yyjson_mut_arr_add_strcpy(document, names, list->names[i]);
    }
}

enum exit_code job_print_json(const struct command_call *call, const struct checkpoint_job *job,
                              const char *path, bool is_dry) {
    const struct made made = made_of(job->manifest);
    yyjson_mut_doc *const document = json_begin();
    yyjson_mut_val *const root = yyjson_mut_doc_get_root(document);
    json_add_text(document, root, "path", path);
    yyjson_mut_obj_add_bool(document, root, "dry_run", is_dry);
    json_add_text(document, root, "format",
                  job->scheme == NULL ? NULL : opaq_format_row(job->scheme->format)->name);
    json_add_text(document, root, "layout",
                  job->scheme == NULL ? "plain" : opaq_layout_name(job->scheme->layout));
    json_add_text(document, root, "activations",
                  job->scheme == NULL ? NULL : activations_name(job->activations));
    yyjson_mut_obj_add_uint(document, root, "files", job->manifest->file_count);
    yyjson_mut_obj_add_uint(document, root, "tensors", made.tensors);
    yyjson_mut_obj_add_uint(document, root, "bytes", manifest_tensor_bytes(job->manifest));
    yyjson_mut_obj_add_uint(document, root, "source_bytes", source_tensor_bytes(job->manifest->weights->model));
    yyjson_mut_obj_add_uint(document, root, "matrices", made.matrices);
    add_shares(document, root, &job->coverages);
    add_names(document, root, "ignored", &job->ignored);
    add_nonfinite(document, root, job->manifest, made.nonfinite);
    add_names(document, root, "notes", &job->notes);
    return json_finish(call, document);
}
