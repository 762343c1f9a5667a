/* cli/read/model.c: see model.h. */
#include "cli/read/model.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "cli/cli_try.h"
#include "cli/read/hub_cache.h"
#include "cli/read/json.h"
#include "cli/texts.h"
#include "cli/write/output_file.h"

/* ---- files ---- */

static enum opaq_status read_header(struct model_file *file, struct opaq_error *error) {
    uint8_t first[ST_LENGTH_BYTES] = {0};
    const struct input_file *const input = &file->input;
    if (input->bytes < ST_LENGTH_BYTES) {
        return opaq_fail(error, OPAQ_ERROR_BUFFER,
                         "%s has %" PRIu64 " bytes, a safetensors file has at least 8", input->path,
                         input->bytes);
    }
    uint64_t length = 0;
    CLI_TRY(input_read(input, 0, first, sizeof first, error));
    CLI_TRY(st_header_length(first, input->bytes, input->path, &length, error));
    char *const json = alloc_array(length + 1, 1);
    enum opaq_status status = input_read(input, ST_LENGTH_BYTES, json, length, error);
    if (status == OPAQ_OK) {
        status = st_header_parse(json, length, input->bytes, input->path, &file->header, error);
    }
    free(json);
    return status;
}

static enum opaq_status add_file(struct model *model, const char *name, struct opaq_error *error) {
    struct model_file file = {.name = copy_text(name, strlen(name))};
    enum opaq_status status = model->is_folder ? folder_open_file(&model->folder, name, &file.input, error)
                                               : input_open(model->path, &file.input, error);
    if (status != OPAQ_OK) {
        free(file.name);
        return status;
    }
    /* added even if the header is invalid: model_close releases it */
    model->files = grow_array(model->files, model->file_count, &model->file_capacity, sizeof *model->files);
    model->files[model->file_count] = file;
    return read_header(&model->files[model->file_count++], error);
}

static enum opaq_status read_json(const struct model *model, const char *name, yyjson_doc **document,
                                  struct opaq_error *error) {
    char *bytes = NULL;
    size_t count = 0;
    CLI_TRY(folder_read(&model->folder, name, MODEL_JSON_LIMIT, &bytes, &count, error));
    struct text path = {0};
    text_print(&path, "%s/%s", model->folder.path, name);
    enum opaq_status status = json_read(bytes, count, text_get(&path), document, error);
    if (status == OPAQ_OK && !yyjson_is_obj(yyjson_doc_get_root(*document))) {
        yyjson_doc_free(*document);
        *document = NULL;
        status = opaq_fail(error, OPAQ_ERROR_TEXT, "%s is JSON but not an object", text_get(&path));
    }
    text_free(&path);
    free(bytes);
    return status;
}

static enum opaq_status read_json_if_there(const struct model *model, const char *name, yyjson_doc **document,
                                           struct opaq_error *error) {
    return folder_has(&model->folder, name) ? read_json(model, name, document, error) : OPAQ_OK;
}

/* ---- index ---- */

enum opaq_status model_check_index(yyjson_doc *index, const char *file, struct opaq_error *error) {
    yyjson_val *const map = yyjson_obj_get(yyjson_doc_get_root(index), "weight_map");
    if (!yyjson_is_obj(map)) {
        return opaq_fail(error, OPAQ_ERROR_TEXT, "%s has no object \"weight_map\"", file);
    }
    size_t at = 0;
    size_t count = 0;
    yyjson_val *key = NULL;
    yyjson_val *value = NULL;
    yyjson_obj_foreach(map, at, count, key, value) {
        if (!json_is_clean(key)) {
            return opaq_fail(error, OPAQ_ERROR_TEXT,
                             "%s: the name of a tensor, \"%.100s\", is empty or has control characters", file,
                             yyjson_get_str(key));
        }
        if (!json_is_clean(value) || !folder_allows(yyjson_get_str(value))) {
            return opaq_fail(error, OPAQ_ERROR_TEXT,
                             "%s: %.150s is in \"%.150s\", which is not the name of a file in this folder",
                             file, yyjson_get_str(key),
                             yyjson_is_str(value) ? yyjson_get_str(value) : "(not a string)");
        }
    }
    return OPAQ_OK;
}

static int compare_texts(const void *first, const void *second) {
    return strcmp(*(const char *const *)first, *(const char *const *)second);
}

/* Each file once, in the order of their names. */
static enum opaq_status add_index_files(struct model *model, struct opaq_error *error) {
    struct text path = {0};
    text_print(&path, "%s/%s", model->folder.path, model->index_name);
    enum opaq_status status = model_check_index(model->index, text_get(&path), error);
    text_free(&path);
    if (status != OPAQ_OK) {
        return status;
    }
    size_t at = 0;
    size_t count = 0;
    yyjson_val *key = NULL;
    yyjson_val *value = NULL;
    yyjson_val *const map = yyjson_obj_get(yyjson_doc_get_root(model->index), "weight_map");
    const char **const names = alloc_array(yyjson_obj_size(map), sizeof(const char *));
    size_t named = 0;
    yyjson_obj_foreach(map, at, count, key, value) { names[named++] = yyjson_get_str(value); }
    if (named != 0) {
        qsort(names, named, sizeof(const char *), compare_texts);
    }
    for (size_t i = 0; i < named && status == OPAQ_OK; ++i) {
        if (i == 0 || strcmp(names[i - 1], names[i]) != 0) {
            status = add_file(model, names[i], error);
        }
    }
    free(names);
    return status;
}

static enum opaq_status compare_with_index(const struct model *model, struct opaq_error *error) {
    size_t at = 0;
    size_t count = 0;
    yyjson_val *key = NULL;
    yyjson_val *value = NULL;
    yyjson_val *const map = yyjson_obj_get(yyjson_doc_get_root(model->index), "weight_map");
    yyjson_obj_foreach(map, at, count, key, value) {
        const struct model_tensor *const found = model_find(model, yyjson_get_str(key));
        if (found == NULL || strcmp(model->files[found->file].name, yyjson_get_str(value)) != 0) {
            return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s/%s says that %.160s is in %s, but it %s%s",
                             model->folder.path, model->index_name, yyjson_get_str(key), yyjson_get_str(value),
                             found == NULL ? "is in no file" : "is in ",
                             found == NULL ? "" : model->files[found->file].name);
        }
    }
    return OPAQ_OK;
}

/* ---- open and check ---- */

static int compare_files(const void *first, const void *second) {
    return strcmp(((const struct model_file *)first)->name, ((const struct model_file *)second)->name);
}

static int compare_name(const void *name, const void *file) {
    return strcmp(name, ((const struct model_file *)file)->name);
}

bool model_has_file(const struct model *model, const char *name) {
    return model->file_count != 0 &&
           bsearch(name, model->files, model->file_count, sizeof *model->files, compare_name) != NULL;
}

static void find_outside(struct model *model, char **names, size_t count) {
    qsort(model->files, model->file_count, sizeof *model->files, compare_files);
    model->outside = alloc_array(count, sizeof *model->outside);
    for (size_t i = 0; i < count; ++i) {
        if (ends_with(names[i], ".safetensors") && !model_has_file(model, names[i])) {
            model->outside[model->outside_count++] = copy_text(names[i], strlen(names[i]));
        }
    }
}

static int compare_tensors(const void *first, const void *second) {
    return strcmp(((const struct model_tensor *)first)->tensor->name,
                  ((const struct model_tensor *)second)->tensor->name);
}

static enum opaq_status gather_tensors(struct model *model, struct opaq_error *error) {
    qsort(model->files, model->file_count, sizeof *model->files, compare_files);
    for (size_t f = 0; f < model->file_count; ++f) {
        model->tensor_count += model->files[f].header.count;
    }
    model->tensors = alloc_array(model->tensor_count, sizeof *model->tensors);
    size_t count = 0;
    for (size_t f = 0; f < model->file_count; ++f) {
        for (size_t i = 0; i < model->files[f].header.count; ++i) {
            model->tensors[count++] = (struct model_tensor){&model->files[f].header.tensors[i], f};
        }
    }
    qsort(model->tensors, count, sizeof *model->tensors, compare_tensors);
    for (size_t i = 1; i < count; ++i) {
        if (compare_tensors(&model->tensors[i - 1], &model->tensors[i]) == 0) {
            return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: %.160s is in %s and in %s", model->path,
                             model->tensors[i].tensor->name, model->files[model->tensors[i - 1].file].name,
                             model->files[model->tensors[i].file].name);
        }
    }
    return OPAQ_OK;
}

static enum opaq_status read_index(struct model *model, char **names, size_t count, struct opaq_error *error) {
    for (size_t i = 0; i < count; ++i) {
        if (ends_with(names[i], ".safetensors.index.json") && names[i][0] != '.') {
            if (model->index_name != NULL) {
                return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s has two indexes: %s and %s", model->path,
                                 model->index_name, names[i]);
            }
            model->index_name = copy_text(names[i], strlen(names[i]));
            CLI_TRY(read_json(model, names[i], &model->index, error));
        }
    }
    return OPAQ_OK;
}

/* A folder without safetensors files; names a file that has weights in another form. */
static enum opaq_status refuse_files(const char *path, char **names, size_t count, struct opaq_error *error) {
    static const char *const others[] = {".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack"};
    for (size_t i = 0; i < count; ++i) {
        for (size_t j = 0; j < sizeof others / sizeof others[0]; ++j) {
            if (ends_with(names[i], others[j])) {
                return opaq_fail(
                    error, OPAQ_ERROR_ARGUMENT,
                    "%s has no safetensors file; %s is of another format: load the model where it can "
                    "be loaded and save it as safetensors, in transformers with save_pretrained",
                    path, names[i]);
            }
        }
    }
    return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s has no safetensors file", path);
}

/* The files of the index, or else every safetensors file of the folder. */
static enum opaq_status add_files(struct model *model, char **names, size_t count, struct opaq_error *error) {
    CLI_TRY(read_index(model, names, count, error));
    if (model->index != NULL) {
        CLI_TRY(add_index_files(model, error));
        if (model->file_count == 0) {
            return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s/%s names no file", model->path, model->index_name);
        }
        find_outside(model, names, count);
        return OPAQ_OK;
    }
    for (size_t i = 0; i < count; ++i) {
        if (ends_with(names[i], ".safetensors") && names[i][0] != '.') {
            CLI_TRY(add_file(model, names[i], error));
        }
    }
    return model->file_count != 0 ? OPAQ_OK : refuse_files(model->path, names, count, error);
}

static enum opaq_status find_files(struct model *model, struct opaq_error *error) {
    char **names = NULL;
    size_t count = 0;
    CLI_TRY(folder_list(&model->folder, &names, &count, error));
    const enum opaq_status status = add_files(model, names, count, error);
    folder_free_names(names, count);
    return status;
}

/* A folder of an interrupted job is incomplete. */
static enum opaq_status check_finished(const struct model *model, struct opaq_error *error) {
    return !folder_has(&model->folder, JOB_FILE)
               ? OPAQ_OK
               : opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                           "%s is not finished: it has a file " JOB_FILE
                           ", so opaq is still writing it or was interrupted; the same command continues it, "
                           "and with "
                           "--overwrite starts again",
                           model->path);
}

static enum opaq_status open_folder(struct model *model, bool follows_links, struct opaq_error *error) {
    model->is_folder = true;
    CLI_TRY(folder_open(model->path, follows_links, &model->folder, error));
    CLI_TRY(check_finished(model, error));
    CLI_TRY(find_files(model, error));
    CLI_TRY(read_json_if_there(model, "config.json", &model->config, error));
    return read_json_if_there(model, "hf_quant_config.json", &model->modelopt, error);
}

static const char *file_name(const char *path) {
    const char *const slash = strrchr(path, '/');
    return slash == NULL ? path : slash + 1;
}

/* On an error the caller closes the model. */
static enum opaq_status open_path(struct model *model, bool follows_links, struct opaq_error *error) {
    struct stat what;
    if (stat(model->path, &what) != 0) {
        return hub_refuse(model->path, errno, error);
    }
    if (S_ISDIR(what.st_mode)) {
        CLI_TRY(open_folder(model, follows_links, error));
    } else if (ends_with(model->path, PARTIAL_END)) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s is an unfinished output file of opaq", model->path);
    } else {
        CLI_TRY(add_file(model, file_name(model->path), error));
    }
    CLI_TRY(gather_tensors(model, error));
    return model->index == NULL ? OPAQ_OK : compare_with_index(model, error);
}

enum opaq_status model_open(const char *path, bool follows_links, struct model *model,
                            struct opaq_error *error) {
    *model = (struct model){.path = hub_resolve(path), .folder = {.handle = -1}};
    const enum opaq_status status = open_path(model, follows_links, error);
    if (status != OPAQ_OK) {
        model_close(model);
    }
    return status;
}

void model_close(struct model *model) {
    for (size_t i = 0; i < model->file_count; ++i) {
        input_close(&model->files[i].input);
        st_header_free(&model->files[i].header);
        free(model->files[i].name);
    }
    free(model->files);
    folder_free_names(model->outside, model->outside_count);
    free(model->tensors);
    free(model->index_name);
    yyjson_doc_free(model->index);
    yyjson_doc_free(model->config);
    yyjson_doc_free(model->modelopt);
    folder_close(&model->folder);
    free(model->path);
    *model = (struct model){.folder = {.handle = -1}};
}

enum opaq_status model_check(const struct model *model, struct opaq_error *error) {
    for (size_t i = 0; i < model->file_count; ++i) {
        const struct model_file *const file = &model->files[i];
        CLI_TRY(input_check(&file->input, model->is_folder ? &model->folder : NULL, file->name, error));
    }
    return OPAQ_OK;
}

const struct model_tensor *model_find(const struct model *model, const char *name) {
    const struct st_tensor wanted = {.name = name};
    const struct model_tensor key = {&wanted, 0};
    return model->tensor_count == 0
               ? NULL
               : bsearch(&key, model->tensors, model->tensor_count, sizeof key, compare_tensors);
}

enum opaq_status model_read(const struct model *model, const struct model_tensor *tensor, uint64_t offset,
                            void *bytes, size_t count, struct opaq_error *error) {
    const struct model_file *const file = &model->files[tensor->file];
    return input_read(&file->input, file->header.data_begin + tensor->tensor->begin + offset, bytes, count,
                      error);
}

yyjson_val *model_quantization(const struct model *model) {
    yyjson_val *const found = model->config == NULL
                                  ? NULL
                                  : yyjson_obj_get(yyjson_doc_get_root(model->config), "quantization_config");
    if (yyjson_is_obj(found)) {
        return found;
    }
    yyjson_val *const root = model->config == NULL ? NULL : yyjson_doc_get_root(model->config);
    yyjson_val *const text_config = yyjson_obj_get(root, "text_config"); /* multimodal models */
    yyjson_val *const inner = yyjson_obj_get(text_config, "quantization_config");
    if (yyjson_is_obj(inner)) {
        return inner;
    }
    return model->modelopt == NULL ? NULL
                                   : yyjson_obj_get(yyjson_doc_get_root(model->modelopt), "quantization");
}
