/* checkpoint/config_read.c: reads a configuration's schemes and the modules that they apply to or not. */
#include <stdlib.h>
#include <string.h>

#include "base/try.h"
#include "checkpoint/config_scheme.h"
#include "opaq/status.h"

struct scheme_entry {
    struct opaq_config_scheme scheme;
    const char *algorithm; /* ModelOpt's, while it is read */
    int64_t first, last;   /* range of its targets in `names` */
};

struct opaq_config {
    struct scheme_entry *schemes;
    int64_t scheme_count;
    const char **names; /* the targets of all schemes, then the ignored ones from `ignored` on */
    int64_t name_count;
    int64_t ignored;
    bool has_stacks; /* weights are gpt-oss's projections */
    char *texts;
    size_t text_bytes;
};

void opaq_config_destroy(struct opaq_config *config) {
    if (config != NULL) {
        free(config->schemes);
        free((void *)config->names);
        free(config->texts);
        free(config);
    }
}

/* Allocates the maximum that the values could need: one scheme per value, one name per value and one more. */
static struct opaq_config *allocate(const struct config_tree *tree) {
    size_t bytes = 2;
    for (int64_t i = 0; i < tree->count; ++i) {
        const struct opaq_config_value *const value = &tree->values[i];
        bytes += (value->key == NULL ? 0 : strlen(value->key) + 1) +
                 (value->kind == OPAQ_JSON_STRING ? strlen(value->text) + 1 : 0);
    }
    struct opaq_config *const config = calloc(1, sizeof *config);
    if (config != NULL) {
        config->schemes = calloc((size_t)tree->count + 1, sizeof *config->schemes);
        config->names = calloc((size_t)tree->count + 1, sizeof *config->names);
        config->texts = malloc(bytes);
    }
    if (config != NULL && (config->schemes == NULL || config->names == NULL || config->texts == NULL)) {
        opaq_config_destroy(config);
        return NULL;
    }
    return config;
}

static void add_name(struct opaq_config *config, const char *name) {
    const size_t bytes = strlen(name) + 1;
    config->names[config->name_count++] = memcpy(config->texts + config->text_bytes, name, bytes);
    config->text_bytes += bytes;
}

static void add_strings(const struct config_tree *tree, int64_t list, struct opaq_config *config) {
    for (int64_t i = tree_inside(tree, list); i >= 0; i = tree_next(tree, i)) {
        add_name(config, tree->values[i].text);
    }
}

/* A scheme for all modules. */
static struct scheme_entry *add_for_all(struct opaq_config *config) {
    struct scheme_entry *const entry = &config->schemes[config->scheme_count++];
    add_name(config, "*");
    entry->last = config->name_count;
    return entry;
}

/* The first of two lists, or the second if the first is absent or empty. */
static enum opaq_status add_ignored(const struct config_tree *tree, int64_t object, const char *key,
                                    const char *other, struct opaq_config *config, struct opaq_error *error) {
    int64_t list = -1;
    config->ignored = config->name_count;
    TRY(tree_strings(tree, object, key, &list, error));
    if (!tree_holds(tree, list) && other != NULL) {
        TRY(tree_strings(tree, object, other, &list, error));
    }
    add_strings(tree, list, config);
    return OPAQ_OK;
}

/* ---- compressed-tensors ---- */

/* All quantized weights are those of linear layers. */
static bool is_class(const char *target) { return strcmp(target, "Linear") == 0; }

static enum opaq_status add_group(const struct config_tree *tree, int64_t group, struct opaq_config *config,
                                  struct opaq_error *error) {
    struct scheme_entry *const entry = &config->schemes[config->scheme_count];
    int64_t targets = -1;
    TRY(tree_strings(tree, group, "targets", &targets, error));
    TRY(scheme_of_group(tree, group, &entry->scheme, error));
    entry->first = config->name_count;
    for (int64_t i = tree_inside(tree, targets); i >= 0; i = tree_next(tree, i)) {
        add_name(config, is_class(tree->values[i].text) ? "*" : tree->values[i].text);
    }
    entry->last = config->name_count;
    ++config->scheme_count;
    return OPAQ_OK;
}

static bool has_class(const struct config_tree *tree, int64_t group) {
    const int64_t targets = tree_find(tree, group, "targets");
    const bool is_list = targets >= 0 && tree->values[targets].kind == OPAQ_JSON_LIST;
    for (int64_t i = tree_inside(tree, is_list ? targets : -1); i >= 0; i = tree_next(tree, i)) {
        if (tree->values[i].kind == OPAQ_JSON_STRING && is_class(tree->values[i].text)) {
            return true;
        }
    }
    return false;
}

/* Features that opaq does not support, whatever the groups are. */
static enum opaq_status refuse_other_work(const struct config_tree *tree, struct opaq_error *error) {
    int64_t sparsity = -1;
    int64_t transform = -1;
    TRY(tree_field(tree, 0, "sparsity_config", OPAQ_JSON_OBJECT, &sparsity, error));
    TRY(tree_field(tree, 0, "transform_config", OPAQ_JSON_OBJECT, &transform, error));
    const int64_t format = tree_find(tree, sparsity, "format");
    const bool is_sparse = format >= 0 && (tree->values[format].kind != OPAQ_JSON_STRING ||
                                           strcmp(tree->values[format].text, "dense") != 0);
    if (is_sparse || tree_holds(tree, tree_find(tree, transform, "config_groups"))) {
        return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED, "the checkpoint %s, which opaq does not do",
                         is_sparse ? "is sparse" : "transforms its inputs (transform_config)");
    }
    return OPAQ_OK;
}

static enum opaq_status read_compressed_tensors(const struct config_tree *tree, struct opaq_config *config,
                                                struct opaq_error *error) {
    int64_t groups = -1;
    TRY(refuse_other_work(tree, error));
    TRY(tree_field(tree, 0, "config_groups", OPAQ_JSON_OBJECT, &groups, error));
    for (int pass = 0; pass < 2; ++pass) { /* targets by module name take precedence over targets by class */
        for (int64_t group = tree_inside(tree, groups); group >= 0; group = tree_next(tree, group)) {
            TRY(tree_expect(tree, group, OPAQ_JSON_OBJECT, error));
            const bool is_used = tree_holds(tree, tree_find(tree, group, "weights"));
            if (is_used && (int)has_class(tree, group) == pass) {
                TRY(add_group(tree, group, config, error));
            }
        }
    }
    return add_ignored(tree, 0, "ignore", NULL, config, error);
}

/* ---- ModelOpt ---- */

/* As in config.json, or as in hf_quant_config.json, whose fields are in "quantization". */
static int64_t modelopt_object(const struct config_tree *tree, int64_t inner, const char *key) {
    return tree_find(tree, inner, key) >= 0 ? inner : 0;
}

/* Targets of each algorithm, in order of first appearance. */
static enum opaq_status read_layers(const struct config_tree *tree, int64_t layers, struct opaq_config *config,
                                    struct opaq_error *error) {
    for (int64_t layer = tree_inside(tree, layers); layer >= 0; layer = tree_next(tree, layer)) {
        const char *algorithm = NULL;
        TRY(tree_expect(tree, layer, OPAQ_JSON_OBJECT, error));
        TRY(tree_string(tree, layer, "quant_algo", &algorithm, error));
        struct scheme_entry *const entry = &config->schemes[config->scheme_count];
        if (algorithm == NULL) {
            return scheme_of_algorithm(NULL, &entry->scheme, error);
        }
        int64_t known = 0;
        while (known < config->scheme_count && strcmp(config->schemes[known].algorithm, algorithm) != 0) {
            ++known;
        }
        if (known < config->scheme_count) {
            continue;
        }
        TRY(scheme_of_algorithm(algorithm, &entry->scheme, error));
        entry->algorithm = algorithm;
        ++config->scheme_count;
    }
    for (int64_t i = 0; i < config->scheme_count; ++i) {
        struct scheme_entry *const entry = &config->schemes[i];
        entry->first = config->name_count;
        for (int64_t layer = tree_inside(tree, layers); layer >= 0; layer = tree_next(tree, layer)) {
            const int64_t value = tree_find(tree, layer, "quant_algo");
            if (value >= 0 && strcmp(tree->values[value].text, entry->algorithm) == 0) {
                add_name(config, tree->values[layer].key);
            }
        }
        entry->last = config->name_count;
        entry->algorithm = NULL;
    }
    return OPAQ_OK;
}

static enum opaq_status read_modelopt(const struct config_tree *tree, struct opaq_config *config,
                                      struct opaq_error *error) {
    const char *algorithm = NULL;
    int64_t inner = -1;
    int64_t layers = -1;
    TRY(tree_field(tree, 0, "quantization", OPAQ_JSON_OBJECT, &inner, error));
    TRY(tree_string(tree, modelopt_object(tree, inner, "quant_algo"), "quant_algo", &algorithm, error));
    TRY(tree_field(tree, modelopt_object(tree, inner, "quantized_layers"), "quantized_layers", OPAQ_JSON_OBJECT,
                   &layers, error));
    const bool is_mixed = algorithm != NULL && is_same_name(algorithm, "MIXED_PRECISION");
    if (is_mixed && tree_holds(tree, layers)) {
        TRY(read_layers(tree, layers, config, error));
    } else {
        TRY(scheme_of_algorithm(algorithm, &add_for_all(config)->scheme, error));
    }
    int64_t list = -1;
    const int64_t object = modelopt_object(tree, inner, "ignore");
    TRY(tree_strings(tree, object, "ignore", &list, error));
    if (tree_holds(tree, list)) {
        return add_ignored(tree, object, "ignore", NULL, config, error);
    }
    return add_ignored(tree, modelopt_object(tree, inner, "exclude_modules"), "exclude_modules", NULL, config,
                       error);
}

/* ---- the others ---- */

static enum opaq_status read_deepseek(const struct config_tree *tree, struct opaq_config *config,
                                      struct opaq_error *error) {
    TRY(scheme_of_deepseek(tree, &add_for_all(config)->scheme, error));
    return add_ignored(tree, 0, "modules_to_not_convert", "ignored_layers", config, error);
}

static enum opaq_status read_gpt_oss(const struct config_tree *tree, struct opaq_config *config,
                                     struct opaq_error *error) {
    scheme_of_gpt_oss(&add_for_all(config)->scheme);
    config->has_stacks = true;
    return add_ignored(tree, 0, "modules_to_not_convert", NULL, config, error);
}

static const struct reader {
    const char *method;
    bool has_suffixes; /* also "modelopt_fp4" */
    enum opaq_layout layout;
    enum opaq_status (*read)(const struct config_tree *tree, struct opaq_config *config,
                             struct opaq_error *error);
} readers[] = {
    {"compressed-tensors", false, OPAQ_LAYOUT_COMPRESSED_TENSORS, read_compressed_tensors},
    {"modelopt", true, OPAQ_LAYOUT_MODELOPT, read_modelopt},
    {"fp8", false, OPAQ_LAYOUT_DEEPSEEK, read_deepseek},
    {"mxfp8", false, OPAQ_LAYOUT_DEEPSEEK, read_deepseek},
    {"mxfp4", false, OPAQ_LAYOUT_GPT_OSS, read_gpt_oss},
};
enum { READER_COUNT = sizeof readers / sizeof readers[0] };

static const struct reader *reader_named(const char *method) {
    for (int i = 0; i < READER_COUNT; ++i) {
        if (is_same_name(method, readers[i].method) ||
            (readers[i].has_suffixes && has_prefix(method, readers[i].method))) {
            return &readers[i];
        }
    }
    return NULL;
}

/* The reader for the quant_method. ModelOpt's own file has none, but a quant_algo. NULL: no reader. */
static const struct reader *find_reader(const struct config_tree *tree) {
    const int64_t method = tree_find(tree, 0, "quant_method");
    if (method < 0 || tree->values[method].kind == OPAQ_JSON_NULL) {
        const int64_t algorithm = tree_find(tree, 0, "quant_algo");
        const bool is_modelopt = algorithm >= 0 && tree->values[algorithm].kind == OPAQ_JSON_STRING;
        return is_modelopt ? reader_named("modelopt") : NULL;
    }
    return tree->values[method].kind == OPAQ_JSON_STRING ? reader_named(tree->values[method].text) : NULL;
}

int opaq_config_layout(const struct opaq_config_value *values, int64_t count) {
    const struct config_tree tree = {values, count};
    if (tree_check(&tree, NULL) != OPAQ_OK || values[0].kind != OPAQ_JSON_OBJECT) {
        return -1;
    }
    const struct reader *const reader = find_reader(&tree);
    return reader == NULL ? -1 : (int)reader->layout;
}

enum opaq_status opaq_config_read(const struct opaq_config_value *values, int64_t count,
                                  struct opaq_config **config, struct opaq_error *error) {
    const struct config_tree tree = {values, count};
    char shown[SHOWN_BYTES];
    TRY(tree_check(&tree, error));
    if (config == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "config_read: config is NULL");
    }
    if (values[0].kind != OPAQ_JSON_OBJECT) {
        return opaq_fail(error, OPAQ_ERROR_TEXT, "the quantization_config is %s, %s, expected an object",
                         tree_show(&tree, 0, shown), tree_kind_name(&tree, 0));
    }
    const struct reader *const reader = find_reader(&tree);
    if (reader == NULL) {
        return opaq_fail(
            error, OPAQ_ERROR_UNSUPPORTED,
            "the checkpoint's quant_method is %s, expected one of compressed-tensors, modelopt, fp8, "
            "mxfp8, mxfp4",
            tree_show(&tree, tree_find(&tree, 0, "quant_method"), shown));
    }
    struct opaq_config *const made = allocate(&tree);
    if (made == NULL) {
        return opaq_fail(error, OPAQ_ERROR_MEMORY, "config_read: no memory for %lld values", (long long)count);
    }
    const enum opaq_status status = reader->read(&tree, made, error);
    if (status != OPAQ_OK) {
        opaq_config_destroy(made);
        return status;
    }
    *config = made;
    return OPAQ_OK;
}

/* ---- what was read ---- */

const struct opaq_config_scheme *opaq_config_scheme(const struct opaq_config *config, int64_t index) {
    const bool is_there = config != NULL && index >= 0 && index < config->scheme_count;
    return is_there ? &config->schemes[index].scheme : NULL;
}

static const char *name_at(const struct opaq_config *config, int64_t first, int64_t last, int64_t index) {
    return index >= 0 && index < last - first ? config->names[first + index] : NULL;
}

const char *opaq_config_target(const struct opaq_config *config, int64_t scheme, int64_t index) {
    if (opaq_config_scheme(config, scheme) == NULL) {
        return NULL;
    }
    return name_at(config, config->schemes[scheme].first, config->schemes[scheme].last, index);
}

const char *opaq_config_ignored(const struct opaq_config *config, int64_t index) {
    return config == NULL ? NULL : name_at(config, config->ignored, config->name_count, index);
}

const char *opaq_config_weight_name(const struct opaq_config *config, int64_t index) {
    static const char *const plain[] = {"weight"};
    static const char *const stacks[] = {"gate_up_proj", "down_proj"};
    if (config == NULL || index < 0 || index >= (config->has_stacks ? 2 : 1)) {
        return NULL;
    }
    return (config->has_stacks ? stacks : plain)[index];
}
