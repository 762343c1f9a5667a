/* cli/write/checkpoint_job.c: see checkpoint_job.h. */
#include "cli/write/checkpoint_job.h"

#include <fnmatch.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli_try.h"
#include "cli/console/interrupt.h"
#include "cli/report/job_summary.h"
#include "cli/write/destination.h"
#include "cli/write/manifest_write.h"

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

void job_note(struct checkpoint_job *job, const char *format, ...) {
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    module_list_add(&job->notes, line, strlen(line));
}

void job_free(struct checkpoint_job *job) {
    module_list_free(&job->ignored);
    module_list_free(&job->notes);
    text_free(&job->settings);
}

size_t module_length(const char *weight) {
    const size_t length = strlen(weight);
    const size_t end = strlen(weight_end);
    return length > end && strcmp(weight + length - end, weight_end) == 0 ? length - end : 0;
}

bool looks_like_embedding(const struct weight *weight) {
    static const char *const embeddings[] = {"*embed*", "*wte.weight", "*wpe.weight", "shared.weight"};
    for (size_t i = 0; i < sizeof embeddings / sizeof embeddings[0]; ++i) {
        if (fnmatch(embeddings[i], weight->name, 0) == 0) {
            return true;
        }
    }
    return false;
}

bool looks_linear(const struct weight *weight) {
    return !looks_like_embedding(weight) && weight_is_float(weight) && weight->data->tensor->rank == 2 &&
           module_length(weight->name) != 0;
}

/* ---- JSON ---- */

static enum opaq_status write_config(const struct checkpoint_job *job, const struct destination *destination,
                                     struct opaq_error *error) {
    const struct model *const model = job->manifest->weights->model;
    const struct quantization quantization = {.scheme = job->scheme,
                                              .activations = job->activations,
                                              .ignored = (const char *const *)job->ignored.names,
                                              .ignored_count = job->ignored.count};
    enum opaq_status status = OPAQ_OK;
    if (job->scheme != NULL && job->scheme->layout == OPAQ_LAYOUT_MODELOPT) {
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
    if (job->scheme != NULL) {
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
    const struct model *const model = job->manifest->weights->model;
    if (model->index == NULL) {
        return OPAQ_OK;
    }
    size_t count = 0;
    for (size_t i = 0; i < job->manifest->file_count; ++i) {
        count += job->manifest->files[i].count;
    }
    struct placed *const placed = alloc_array(count, sizeof *placed);
    count = 0;
    for (size_t i = 0; i < job->manifest->file_count; ++i) {
        const struct manifest_file *const file = &job->manifest->files[i];
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
                       yyjson_mut_uint(document, manifest_tensor_bytes(job->manifest)));
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

/* ---- running ---- */

/* Writes the small files first, so that their errors come before the long work. */
static enum opaq_status write_all(const struct checkpoint_job *job, const struct destination *destination,
                                  const struct run_options *options, struct opaq_error *error) {
    CLI_TRY(destination_copy_others(destination, job->manifest->weights->model, error));
    CLI_TRY(manifest_write(job->manifest, destination->folder, destination->path, destination->is_done, options,
                           error));
    if (!destination->is_folder) {
        return OPAQ_OK;
    }
    CLI_TRY(model_check(job->manifest->weights->model, error));
    CLI_TRY(write_index(job, destination, error));
    CLI_TRY(write_config(job, destination, error));
    return destination_finish(destination, error);
}

static void note_source(struct checkpoint_job *job) {
    const struct model *const model = job->manifest->weights->model;
    for (size_t i = 0; i < model->outside_count; ++i) {
        job_note(job, "%s is not in %s and is not copied", model->outside[i], model->index_name);
    }
    if (model->config != NULL) {
        return;
    }
    const char *const what = job->scheme == NULL ? "" : opaq_layout_name(job->scheme->layout);
    job_note(job,
             "%s has no config.json, so the result has none: transformers and vLLM load it only with one%s%s%s",
             model->path, job->scheme == NULL ? "" : " whose quantization_config describes the layout ", what,
             job->scheme == NULL ? "" : " as 'opaq quantize' writes it for a folder that has one");
}

enum exit_code checkpoint_run(const struct command_call *call, struct checkpoint_job *job, const char *path,
                              const char *what) {
    const bool is_json = call_has(call, "json");
    note_source(job);
    if (call_has(call, "dry-run")) {
        if (is_json) {
            return job_print_json(call, job, path, true);
        }
        job_print_manifest(job, !call_has(call, "tensors"));
        job_print_summary(job, path, true);
        return EXIT_FINE;
    }
    long long threads = 0;
    if (call_has(call, "threads") && !call_integer(call, "threads", 1, 1024, &threads)) {
        return EXIT_USAGE;
    }
    const struct run_options options = {what, (int)threads, call_has(call, "quiet"), job->allows_nonfinite};
    struct opaq_error error;
    struct destination destination;
    interrupt_watch();
    enum opaq_status status = destination_open(path, job->manifest, text_get(&job->settings),
                                               call_has(call, "overwrite"), &destination, &error);
    if (status == OPAQ_OK) {
        status = write_all(job, &destination, &options, &error);
        destination_close(&destination);
    }
    if (status != OPAQ_OK) {
        complain(call, "%s", error.text);
        return interrupt_seen() ? EXIT_STOPPED : EXIT_TROUBLE;
    }
    if (is_json) {
        return job_print_json(call, job, path, false);
    }
    if (!options.is_quiet) {
        job_print_summary(job, path, false);
    }
    return EXIT_FINE;
}
