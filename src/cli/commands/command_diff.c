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
#include "cli/report/like_rows.h"
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

static const char *headings(const struct model_diff *diff, enum difference_kind kind, const char **alignment) {
    if (kind == OTHER_TYPE) {
        *alignment = "lrll";
        return "tensors|count|in A|in B";
    }
    if (kind == OTHER_CONTENT && diff->has_values) {
        *alignment = "lrllrrrr";
        return "weights|count|in A|in B|different elements|of|largest difference|lowest SQNR dB";
    }
    *alignment = kind == OTHER_CONTENT ? "lrlrr" : "lrl";
    return kind == OTHER_CONTENT ? "tensors|count|dtype and shape|different bytes|of"
                                 : "tensors|count|dtype and shape";
}

/* The figures of a group: sums, the largest difference and the lowest SQNR. NaN where contents are not numbers. */
static struct tensor_difference sum_of(const struct model_diff *diff, const size_t *members,
                                       const struct like_rows *rows, size_t row) {
    struct tensor_difference sum = diff->tensors[members[rows->rows[row].first]];
    for (size_t i = rows->rows[row].first + 1, left = rows->rows[row].count - 1; left != 0; ++i) {
        if (rows->row_of[i] == row) {
            const struct tensor_difference *const found = &diff->tensors[members[i]];
            sum.different += found->different;
            sum.all += found->all;
            sum.largest = found->largest > sum.largest ? found->largest : sum.largest;
            sum.sqnr = found->sqnr < sum.sqnr ? found->sqnr : sum.sqnr;
            --left;
        }
    }
    return sum;
}

static void content_cells(struct report_table *table, bool has_values, const struct tensor_difference *sum) {
    if (has_values && isnan(sum->largest)) {
        table_cell(table, "%s", sum->b);
        table_cell(table, "other bytes");
        table_cell(table, "-");
        table_cell(table, "-");
        table_cell(table, "-");
        return;
    }
    if (has_values) {
        table_cell(table, "%s", sum->b);
    }
    table_cell(table, "%s", count_text(sum->different).text);
    table_cell(table, "%s", count_text(sum->all).text);
    if (has_values) {
        table_cell(table, "%.4g", sum->largest);
        table_cell(table, "%s", decibel_text(sum->sqnr).text);
    }
}

static void print_rows(const struct model_diff *diff, enum difference_kind kind, const size_t *members,
                       const struct like_rows *rows) {
    const char *alignment = NULL;
    const char *const titles = headings(diff, kind, &alignment);
    struct report_table *const table = table_begin(titles, alignment);
    for (size_t row = 0; row < rows->count; ++row) {
        const struct tensor_difference sum = sum_of(diff, members, rows, row);
        table_cell(table, "%s", rows->rows[row].name);
        table_cell(table, "%zu", rows->rows[row].count);
        table_cell(table, "%s", kind == ONLY_IN_B ? sum.b : sum.a);
        if (kind == OTHER_TYPE) {
            table_cell(table, "%s", sum.b);
        } else if (kind == OTHER_CONTENT) {
            content_cells(table, diff->has_values, &sum);
        }
    }
    show(stdout, "\n%s\n", kinds[kind].title);
    table_end(table, stdout);
}

/* Prints the differences of a kind, grouped by names without numbers, dtypes and shapes. */
static void print_kind(const struct model_diff *diff, enum difference_kind kind, bool is_grouped) {
    size_t *const members = alloc_array(diff->count, sizeof *members);
    struct like_item *const items = alloc_array(diff->count, sizeof *items);
    struct text *const details = alloc_array(diff->count, sizeof *details);
    size_t count = 0;
    for (size_t i = 0; i < diff->count; ++i) {
        const struct tensor_difference *const found = &diff->tensors[i];
        if (found->kind == kind) {
            text_print(&details[count], "%s, %s%s", found->a == NULL ? "" : found->a,
                       found->b == NULL ? "" : found->b, isnan(found->largest) ? ", bytes" : "");
            members[count] = i;
            items[count] = (struct like_item){found->name, details[count].bytes};
            ++count;
        }
    }
    if (count != 0) {
        struct like_rows rows = like_rows_make(items, count, is_grouped);
        print_rows(diff, kind, members, &rows);
        like_rows_free(&rows);
    }
    for (size_t i = 0; i < count; ++i) {
        text_free(&details[i]);
    }
    free(details);
    free(items);
    free(members);
}

static void print_keys(const char *title, const struct key_differences *keys) {
    for (size_t i = 0; i < keys->count; ++i) {
        show(stdout, "%s%s\"", i == 0 ? "\n" : "", title);
        show_text(stdout, keys->items[i].key);
        show(stdout, "\": %s\n", kinds[keys->items[i].kind].title);
    }
}

static void print_diff(const struct checkpoint *a, const struct checkpoint *b, const struct model_diff *diff,
                       bool is_grouped) {
    const char *const what = diff->has_values ? "weights" : "tensors";
    show(stdout, "A  %s\nB  %s\n", a->model.path, b->model.path);
    for (int kind = 0; kind < KIND_COUNT; ++kind) {
        print_kind(diff, (enum difference_kind)kind, is_grouped);
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
            print_diff(a, b, &diff, !call_has(call, "tensors"));
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
