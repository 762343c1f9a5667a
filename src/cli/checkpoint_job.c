/* cli/checkpoint_job.c: see checkpoint_job.h. */
#include "cli/checkpoint_job.h"

#include <fnmatch.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/destination.h"
#include "cli/interrupt.h"
#include "cli/plan_run.h"
#include "cli/quantization_config.h"
#include "cli/shown.h"
#include "cli/units.h"

static const char weight_end[] = ".weight";

void module_list_add(struct module_list *list, const char *name, size_t length) {
    list->names = grow_array(list->names, list->count, &list->capacity, sizeof *list->names);
    list->names[list->count++] = copy_text(name, length);
}

void module_list_free(struct module_list *list) {
    for (size_t i = 0; i < list->count; ++i) {
        free(list->names[i]);
    }
    free(list->names);
    *list = (struct module_list){0};
}

size_t module_length(const char *weight) {
    const size_t length = strlen(weight);
    const size_t end = strlen(weight_end);
    return length > end && strcmp(weight + length - end, weight_end) == 0 ? length - end : 0;
}

bool looks_linear(const struct weight *weight) {
    static const char *const embeddings[] = {"*embed*", "*wte.weight", "*wpe.weight", "shared.weight"};
    for (size_t i = 0; i < sizeof embeddings / sizeof embeddings[0]; ++i) {
        if (fnmatch(embeddings[i], weight->name, 0) == 0) {
            return false;
        }
    }
    return weight_is_float(weight) && weight->data->tensor->rank == 2 && module_length(weight->name) != 0;
}

/* ---- JSON ---- */

static enum opaq_status write_config(const struct checkpoint_job *job, const struct destination *destination,
                                     struct opaq_error *error) {
    const struct model *const model = job->plan->weights->model;
    const struct quantization quantization = {.row = job->row,
                                              .has_input_scales = job->has_input_scales,
                                              .ignored = (const char *const *)job->ignored.names,
                                              .ignored_count = job->ignored.count};
    enum opaq_status status = OPAQ_OK;
    if (job->row != NULL && job->row->layout == OPAQ_LAYOUT_MODELOPT) {
        yyjson_mut_doc *const document = yyjson_mut_doc_new(NULL);
        yyjson_mut_doc_set_root(document, modelopt_config(document, &quantization));
        status = destination_write_json(destination, model, "hf_quant_config.json",
                                        model->config == NULL ? model->files[0].name : "config.json", document,
                                        error);
        yyjson_mut_doc_free(document);
    }
    if (status != OPAQ_OK || model->config == NULL) {
        return status;
    }
    yyjson_mut_doc *const document = yyjson_doc_mut_copy(model->config, NULL);
    yyjson_mut_val *const root = yyjson_mut_doc_get_root(document);
    yyjson_mut_obj_remove_key(root, "quantization_config");
    yyjson_mut_obj_remove_key(yyjson_mut_obj_get(root, "text_config"), "quantization_config");
    if (job->row != NULL) {
        yyjson_mut_obj_add_val(document, root, "quantization_config",
                               quantization_config(document, &quantization));
    }
    status = destination_write_json(destination, model, "config.json", "config.json", document, error);
    yyjson_mut_doc_free(document);
    return status;
}

struct placed {
    const char *name;
    const char *file;
};

static int compare_placed(const void *first, const void *second) {
    return strcmp(((const struct placed *)first)->name, ((const struct placed *)second)->name);
}

static enum opaq_status write_index(const struct checkpoint_job *job, const struct destination *destination,
                                    struct opaq_error *error) {
    const struct model *const model = job->plan->weights->model;
    if (model->index == NULL) {
        return OPAQ_OK;
    }
    size_t count = 0;
    for (size_t i = 0; i < job->plan->file_count; ++i) {
        count += job->plan->files[i].count;
    }
    struct placed *const placed = alloc_array(count, sizeof *placed);
    count = 0;
    for (size_t i = 0; i < job->plan->file_count; ++i) {
        const struct plan_file *const file = &job->plan->files[i];
        for (size_t k = 0; k < file->count; ++k) {
            placed[count++] = (struct placed){file->entries[k].name, file->name};
        }
    }
    if (count != 0) {
        qsort(placed, count, sizeof *placed, compare_placed);
    }
    yyjson_mut_doc *const document = yyjson_doc_mut_copy(model->index, NULL);
    yyjson_mut_val *const root = yyjson_mut_doc_get_root(document);
    yyjson_mut_val *metadata = yyjson_mut_obj_get(root, "metadata");
    if (!yyjson_mut_is_obj(metadata)) {
        metadata = yyjson_mut_obj(document);
        yyjson_mut_obj_put(root, yyjson_mut_str(document, "metadata"), metadata);
    }
    yyjson_mut_obj_put(metadata, yyjson_mut_str(document, "total_size"),
                       yyjson_mut_uint(document, plan_tensor_bytes(job->plan)));
    yyjson_mut_val *const map = yyjson_mut_obj(document);
    for (size_t i = 0; i < count; ++i) {
        yyjson_mut_obj_add_str(document, map, placed[i].name, placed[i].file);
    }
    yyjson_mut_obj_put(root, yyjson_mut_str(document, "weight_map"), map);
    const enum opaq_status status =
        destination_write_json(destination, model, model->index_name, model->index_name, document, error);
    yyjson_mut_doc_free(document);
    free(placed);
    return status;
}

/* ---- what is said ---- */

static uint64_t source_tensor_bytes(const struct model *model) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < model->tensor_count; ++i) {
        bytes += model->tensors[i].tensor->bytes;
    }
    return bytes;
}

static void summarize(const struct checkpoint_job *job, const char *path, bool is_dry) {
    const struct plan *const plan = job->plan;
    uint64_t elements = 0;
    uint64_t bytes = 0;
    size_t made = 0;
    size_t entries = 0;
    for (size_t i = 0; i < plan->file_count; ++i) {
        entries += plan->files[i].count;
        for (size_t k = 0; k < plan->files[i].count; ++k) {
            const struct plan_entry *const entry = &plan->files[i].entries[k];
            bytes += entry->copied == NULL && entry->given == NULL ? entry->bytes : 0;
        }
    }
    for (size_t i = 0; i < plan->target_count; ++i) {
        const struct weight_part *const part = &plan->targets[i].part;
        elements += (uint64_t)part->rows * (uint64_t)part->columns;
        ++made;
    }
    show(stdout, "%s: %zu tensors in %zu file%s, %s (source: %s)\n", path, entries, plan->file_count,
         plan->file_count == 1 ? "" : "s", size_text(plan_tensor_bytes(plan)).text,
         size_text(source_tensor_bytes(plan->weights->model)).text);
    if (made != 0) {
        show(stdout, "%s %zu matrices of %.1f million weights as %s%s%s: %.3f bits a weight\n",
             is_dry ? "would write" : "wrote", made, (double)elements / 1e6,
             job->row == NULL ? "floats" : opaq_format_row(job->row->format)->name,
             job->row == NULL ? "" : ", ", job->row == NULL ? "" : opaq_layout_name(job->row->layout),
             elements == 0 ? 0.0 : (double)bytes * 8.0 / (double)elements);
    }
    const struct model *const model = plan->weights->model;
    for (size_t i = 0; i < model->outside_count; ++i) {
        show(stdout, "note: ");
        show_text(stdout, model->outside[i]);
        show(stdout, " is not in %s and is left behind\n", model->index_name);
    }
    if (job->row != NULL && job->ignored.count != 0) {
        show(stdout, "%zu linear module%s not quantized:", job->ignored.count,
             job->ignored.count == 1 ? " is" : "s are");
        const size_t shown = is_dry ? job->ignored.count : 4;
        for (size_t i = 0; i < job->ignored.count && i < shown; ++i) {
            show(stdout, "%s %s", i == 0 ? "" : ",", job->ignored.names[i]);
        }
        show(stdout, "%s\n", job->ignored.count > shown ? ", ..." : "");
    }
}

static void print_plan(const struct checkpoint_job *job) {
    for (size_t i = 0; i < job->plan->file_count; ++i) {
        const struct plan_file *const file = &job->plan->files[i];
        show(stdout, "%s  %" PRIu64 " bytes\n", file->name, file->bytes);
        for (size_t k = 0; k < file->count; ++k) {
            const struct plan_entry *const entry = &file->entries[k];
            struct st_tensor tensor = {.dtype = entry->dtype, .rank = entry->rank};
            memcpy(tensor.shape, entry->shape, sizeof tensor.shape);
            struct text what = {0};
            st_describe(&tensor, &what);
            show(stdout, "  %-8s %s  %s\n",
                 entry->copied != NULL  ? "copy"
                 : entry->given != NULL ? "convert"
                                        : "make",
                 entry->name, text_get(&what));
            text_free(&what);
        }
    }
}

/* ---- running ---- */

/* The small files first: what cannot be copied is then known before the work. */
static enum opaq_status write_all(const struct checkpoint_job *job, const struct destination *destination,
                                  const struct run_options *options, struct opaq_error *error) {
    enum opaq_status status = destination_copy_others(destination, job->plan->weights->model, error);
    if (status == OPAQ_OK) {
        status =
            plan_run(job->plan, destination->folder, destination->path, destination->is_done, options, error);
    }
    if (status != OPAQ_OK || !destination->is_folder) {
        return status;
    }
    status = model_check(job->plan->weights->model, error);
    if (status != OPAQ_OK) {
        return status;
    }
    status = write_index(job, destination, error);
    if (status == OPAQ_OK) {
        status = write_config(job, destination, error);
    }
    return status != OPAQ_OK ? status : destination_finish(destination, error);
}

enum exit_code checkpoint_run(const struct command_call *call, struct checkpoint_job *job, const char *path,
                              const char *what) {
    if (call_has(call, "dry-run")) {
        print_plan(job);
        summarize(job, path, true);
        return EXIT_FINE;
    }
    long long threads = 0;
    if (call_has(call, "threads") && !call_integer(call, "threads", 1, 1024, &threads)) {
        return EXIT_USAGE;
    }
    const struct run_options options = {what, (int)threads, call_has(call, "quiet")};
    struct opaq_error error;
    struct destination destination;
    interrupt_watch();
    enum opaq_status status = destination_open(path, job->plan, text_get(&job->settings),
                                               call_has(call, "overwrite"), &destination, &error);
    if (status == OPAQ_OK) {
        status = write_all(job, &destination, &options, &error);
        destination_close(&destination);
    }
    if (status != OPAQ_OK) {
        complain(call, "%s", error.text);
        return interrupt_seen() ? EXIT_STOPPED : EXIT_TROUBLE;
    }
    if (!options.is_quiet) {
        summarize(job, path, false);
    }
    return EXIT_FINE;
}
