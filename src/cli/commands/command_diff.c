/* cli/commands/command_diff.c: `opaq diff`: compares two checkpoints. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "cli/commands/commands.h"
#include "cli/console/json_output.h"
#include "cli/console/number_text.h"
#include "cli/console/report_table.h"
#include "cli/console/terminal.h"
#include "cli/report/model_diff.h"
#include "cli/report/weight_pairs.h"

static const struct {
    const char *title;
    const char *key;
} kinds[] = {
    [ONLY_IN_A] = {"only in A", "only_in_a"},
    [ONLY_IN_B] = {"only in B", "only_in_b"},
    [OTHER_TYPE] = {"of another dtype or shape", "other_type"},
    [OTHER_CONTENT] = {"different", "different"},
};
enum { KIND_COUNT = sizeof kinds / sizeof kinds[0] };

/* With --values only the numbers count; configuration and metadata describe how they are stored. */
static bool is_equal(const struct model_diff *diff) {
    return diff->count == 0 && (diff->has_values || (diff->config.count == 0 && diff->metadata.count == 0 &&
                                                     diff->is_quantization_equal));
}

/* ---- tables ---- */

static void print_content(const struct model_diff *diff, const struct tensor_difference *found) {
    show(stdout, "  %s  %s", found->name, found->a);
    if (diff->has_values && !isnan(found->largest)) {
        show(stdout, ", %s: %s of %s elements, by at most %.4g, SQNR %s dB\n", found->b,
             count_text(found->different).text, count_text(found->all).text, found->largest,
             decibel_text(found->sqnr).text);
    } else if (diff->has_values) {
        show(stdout, ": other bytes\n");
    } else {
        show(stdout, ": %s of %s bytes\n", count_text(found->different).text, count_text(found->all).text);
    }
}

static void print_kind(const struct model_diff *diff, enum difference_kind kind) {
    bool is_first = true;
    for (size_t i = 0; i < diff->count; ++i) {
        const struct tensor_difference *const found = &diff->tensors[i];
        if (found->kind != kind) {
            continue;
        }
        if (is_first) {
            show(stdout, "\n%s\n", kinds[kind].title);
            is_first = false;
        }
        if (kind == OTHER_CONTENT) {
            print_content(diff, found);
        } else if (kind == OTHER_TYPE) {
            show(stdout, "  %s  %s, %s\n", found->name, found->a, found->b);
        } else {
            show(stdout, "  %s  %s\n", found->name, kind == ONLY_IN_A ? found->a : found->b);
        }
    }
}

static void print_keys(const char *title, const struct key_differences *keys) {
    for (size_t i = 0; i < keys->count; ++i) {
        show(stdout, "%s%s\"", i == 0 ? "\n" : "", title);
        show_text(stdout, keys->items[i].key);
        show(stdout, "\": %s\n", kinds[keys->items[i].kind].title);
    }
}

static void print_diff(const struct checkpoint *a, const struct checkpoint *b, const struct model_diff *diff) {
    const char *const what = diff->has_values ? "weights" : "tensors";
    show(stdout, "A  %s\nB  %s\n", a->model.path, b->model.path);
    for (int kind = 0; kind < KIND_COUNT; ++kind) {
        print_kind(diff, (enum difference_kind)kind);
    }
    print_keys("config.json: ", &diff->config);
    print_keys("metadata: ", &diff->metadata);
    show(stdout, "\nquantization_config: %s\n", diff->is_quantization_equal ? "equal" : "different");
    if (diff->count == 0) {
        show(stdout, "all %zu %s are equal", diff->compared, what);
        if (diff->rounded != 0) {
            show(stdout, ", %zu of them up to the rounding of float32", diff->rounded);
        }
        show(stdout, "\n");
        return;
    }
    size_t counts[KIND_COUNT] = {0};
    for (size_t i = 0; i < diff->count; ++i) {
        ++counts[diff->tensors[i].kind];
    }
    show(stdout, "%s: %zu in both, of which %zu differ; %zu only in A, %zu only in B\n", what, diff->compared,
         counts[OTHER_TYPE] + counts[OTHER_CONTENT], counts[ONLY_IN_A], counts[ONLY_IN_B]);
}

/* ---- JSON ---- */

static void add_tensors(yyjson_mut_doc *document, const struct model_diff *diff) {
    yyjson_mut_val *const root = yyjson_mut_doc_get_root(document);
    for (int kind = 0; kind < KIND_COUNT; ++kind) {
        yyjson_mut_val *const list = yyjson_mut_obj_add_arr(document, root, kinds[kind].key);
        for (size_t i = 0; i < diff->count; ++i) {
            const struct tensor_difference *const found = &diff->tensors[i];
            if ((int)found->kind != kind) {
                continue;
            }
            yyjson_mut_val *const object = yyjson_mut_arr_add_obj(document, list);
            json_add_text(document, object, "name", found->name);
            json_add_text(document, object, "a", found->a);
            json_add_text(document, object, "b", found->b);
            if (kind == OTHER_CONTENT) {
                yyjson_mut_obj_add_uint(document, object, diff->has_values ? "elements" : "bytes",
                                        found->different);
                yyjson_mut_obj_add_uint(document, object, "of", found->all);
            }
            if (kind == OTHER_CONTENT && diff->has_values) {
                yyjson_mut_obj_add_real(document, object, "largest", found->largest);
                yyjson_mut_obj_add_real(document, object, "sqnr_db", found->sqnr);
            }
        }
    }
}

static void add_keys(yyjson_mut_doc *document, const char *name, const struct key_differences *keys) {
    yyjson_mut_val *const object = yyjson_mut_obj_add_obj(document, yyjson_mut_doc_get_root(document), name);
    for (int kind = 0; kind < KIND_COUNT; ++kind) {
        if (kind == OTHER_TYPE) {
            continue;
        }
        yyjson_mut_val *const list = yyjson_mut_obj_add_arr(document, object, kinds[kind].key);
        for (size_t i = 0; i < keys->count; ++i) {
            if ((int)keys->items[i].kind == kind) {
                yyjson_mut_arr_add_strcpy(document, list, keys->items[i].key);
            }
        }
    }
}

static enum exit_code print_json(const struct command_call *call, const struct checkpoint *a,
                                 const struct checkpoint *b, const struct model_diff *diff) {
    yyjson_mut_doc *const document = json_begin();
    yyjson_mut_val *const root = yyjson_mut_doc_get_root(document);
    json_add_text(document, root, "a", a->model.path);
    json_add_text(document, root, "b", b->model.path);
    yyjson_mut_obj_add_bool(document, root, "equal", is_equal(diff));
    yyjson_mut_obj_add_bool(document, root, "values", diff->has_values);
    yyjson_mut_obj_add_uint(document, root, "compared", diff->compared);
    yyjson_mut_obj_add_uint(document, root, "rounded", diff->rounded);
    add_tensors(document, diff);
    add_keys(document, "config", &diff->config);
    add_keys(document, "metadata", &diff->metadata);
    yyjson_mut_obj_add_bool(document, root, "quantization_config_equal", diff->is_quantization_equal);
    return json_finish(call, document);
}

/* ---- the command ---- */

static uint64_t bytes_to_read(const struct checkpoint *a, const struct checkpoint *b, bool has_values) {
    if (!has_values) {
        return diff_bytes(a, b);
    }
    uint64_t bytes = 0;
    for (size_t i = 0; i < a->weights.count; ++i) {
        const struct weight *const other = weights_named(&b->weights, a->weights.items[i].name);
        bytes += other == NULL ? 0 : weight_bytes(&a->weights.items[i]) + weight_bytes(other);
    }
    return bytes;
}

static enum exit_code compare(const struct command_call *call, const struct checkpoint *a,
                              const struct checkpoint *b) {
    const bool has_values = call_has(call, "values");
    struct model_diff diff = {0};
    struct opaq_error error;
    bool is_stopped = false;
    struct progress *const progress = progress_begin("comparing", bytes_to_read(a, b, has_values), false);
    enum opaq_status status = has_values ? diff_values(a, b, progress, &diff, &is_stopped, &error)
                                         : diff_tensors(a, b, progress, &diff, &is_stopped, &error);
    progress_end(progress, status == OPAQ_OK);
    if (status == OPAQ_OK) {
        status = checkpoints_check(a, b, &error);
    }
    enum exit_code code = is_stopped ? EXIT_STOPPED : EXIT_TROUBLE;
    if (status != OPAQ_OK) {
        complain(call, "%s", error.text);
    } else {
        diff_keys(a, b, &diff);
        code = EXIT_FINE;
        if (call_has(call, "json")) {
            code = print_json(call, a, b, &diff);
        } else {
            print_diff(a, b, &diff);
        }
        code = code == EXIT_FINE && !is_equal(&diff) ? EXIT_NO : code;
    }
    diff_free(&diff);
    return code;
}

enum exit_code command_diff(const struct command_call *call) {
    struct checkpoint a;
    struct checkpoint b;
    if (!checkpoint_open(call, call->arguments[0], &a)) {
        return EXIT_TROUBLE;
    }
    enum exit_code code = EXIT_TROUBLE;
    if (checkpoint_open(call, call->arguments[1], &b)) {
        code = compare(call, &a, &b);
        checkpoint_close(&b);
    }
    checkpoint_close(&a);
    return code;
}
