/* cli/read/model.h: a checkpoint on disk: one safetensors file, or a folder with its files, index and configuration.
 * Opening reads headers only. */
#ifndef OPAQ_CLI_READ_MODEL_H
#define OPAQ_CLI_READ_MODEL_H

#include <yyjson.h>

#include "cli/read/folder.h"
#include "cli/read/st_header.h"

#define JOB_FILE ".opaq-job"       /* marks a folder that is being written, see destination.h */
#define MODEL_JSON_LIMIT 268435456 /* bytes of an index or a configuration */

struct model_file {
    char *name; /* in the folder */
    struct input_file input;
    struct st_header header;
};

struct model_tensor {
    const struct st_tensor *tensor;
    size_t file;
};

struct model {
    char *path;     /* as given by the user */
    bool is_folder; /* otherwise `folder` is not set */
    struct folder folder;
    struct model_file *files; /* sorted by name */
    size_t file_count;
    size_t file_capacity;
    struct model_tensor *tensors; /* sorted by name; names are unique */
    size_t tensor_count;
    char *index_name;     /* "model.safetensors.index.json"; NULL if there is none */
    yyjson_doc *index;    /* NULL if there is none */
    yyjson_doc *config;   /* config.json; NULL if there is none */
    yyjson_doc *modelopt; /* hf_quant_config.json; NULL if there is none */
    char **outside;       /* .safetensors files of the folder that the index does not name */
    size_t outside_count;
};

/* On an error the model is empty. Fails for an unfinished job. */
enum opaq_status model_open(const char *path, bool follows_links, struct model *model,
                            struct opaq_error *error);
void model_close(struct model *model);

/* Fails if a file has changed since it was opened. */
enum opaq_status model_check(const struct model *model, struct opaq_error *error);

/* Whether a file of the folder is one of those in `files`. */
bool model_has_file(const struct model *model, const char *name);

/* NULL if there is none of that name. */
const struct model_tensor *model_find(const struct model *model, const char *name);

/* Reads bytes [offset, offset + count) of a tensor. May be called from any thread. */
enum opaq_status model_read(const struct model *model, const struct model_tensor *tensor, uint64_t offset,
                            void *bytes, size_t count, struct opaq_error *error);

/* The configuration's quantization_config, or the contents of hf_quant_config.json; NULL if there is neither. */
yyjson_val *model_quantization(const struct model *model);

/* Checks an index's weight_map, from names of tensors to names of files of the folder. Used by model_open and by the
 * fuzzer. */
enum opaq_status model_check_index(yyjson_doc *index, const char *file, struct opaq_error *error);

#endif
