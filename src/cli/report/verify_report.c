/* cli/report/verify_report.c: see verify_report.h. */
#include "cli/report/verify_report.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "cli/console/json_output.h"
#include "cli/console/number_text.h"
#include "cli/console/report_table.h"
#include "cli/console/terminal.h"

enum { SHOWN = 20, POSITION_BYTES = 80 };

/* An element's matrix, row and column. */
static void position_of(const struct comparison *comparison, int64_t position[3]) {
    const int64_t columns = comparison->pair->quantized.columns;
    const int64_t rows = comparison->pair->quantized.rows;
    const int64_t at = comparison->error.largest_at;
    position[0] = at / columns / rows;
    position[1] = at / columns % rows;
    position[2] = at % columns;
}

static const char *position_text(const struct comparison *comparison, char *text, size_t bytes) {
    int64_t position[3];
    if (!comparison->has_error || comparison->error.largest_at < 0) {
        snprintf(text, bytes, "-");
        return text;
    }
    position_of(comparison, position);
    if (comparison->pair->matrices > 1) {
        snprintf(text, bytes, "%" PRId64 ", %" PRId64 ", %" PRId64, position[0], position[1], position[2]);
    } else {
        snprintf(text, bytes, "%" PRId64 ", %" PRId64, position[1], position[2]);
    }
    return text;
}

/* ---- tables ---- */

static void weight_cells(struct report_table *table, const struct judged *judged) {
    const struct comparison *const comparison = judged->comparison;
    const struct weight_error *const error = &comparison->error;
    char text[POSITION_BYTES];
    table_cell(table, "%s", comparison->pair->name);
    table_cell(table, "%s", judged->kind);
    if (comparison->has_error) {
        table_cell(table, "%s", decibel_text(error->sqnr).text);
        table_cell(table, "%.6f", error->cosine);
        table_cell(table, "%.3g", error->relative);
        table_cell(table, "%.3g", error->largest);
    } else {
        for (int i = 0; i < 4; ++i) {
            table_cell(table, "-");
        }
    }
    table_cell(table, "%s", position_text(comparison, text, sizeof text));
    table_cell(table, "%s", verdict_name(judged->verdict));
}

static void print_weights(const struct judgement *judgement, bool has_all) {
    struct report_table *const table =
        table_begin("weight|kind|SQNR dB|cosine|relative|largest|at|verdict", "llrrrrll");
    size_t shown = 0;
    size_t left = 0;
    for (size_t i = 0; i < judgement->count; ++i) {
        const struct judged *const judged = &judgement->items[i];
        const bool is_exact = judged->verdict == VERDICT_PASS && judged->comparison->is_equal;
        if (!has_all && (is_exact || shown == SHOWN)) {
            left += !is_exact;
            continue;
        }
        weight_cells(table, judged);
        ++shown;
    }
    table_end(table, stdout);
    if (left != 0) {
        show(stdout, "  ... and %zu more, which --all shows\n", left);
    }
    show(stdout, "%s", shown == 0 ? "" : "\n");
}

static void print_kinds(const struct judgement *judgement) {
    struct report_table *const table =
        table_begin("kind|weights|fail|least dB|median dB|required dB|least cosine|required", "lrrrrrrr");
    for (size_t i = 0; i < judgement->kind_count; ++i) {
        const struct kind_summary *const kind = &judgement->kinds[i];
        const bool is_measured = kind->measured != 0;
        table_cell(table, "%s", kind->kind);
        table_cell(table, "%zu", kind->count);
        table_cell(table, "%zu", kind->failed);
        table_cell(table, "%s", is_measured ? decibel_text(kind->least_sqnr).text : "-");
        table_cell(table, "%s", is_measured ? decibel_text(kind->median_sqnr).text : "-");
        if (kind->is_quantized) {
            table_cell(table, "%s", decibel_text(kind->limit.sqnr).text);
        } else {
            table_cell(table, "equal");
        }
        if (is_measured) {
            table_cell(table, "%.6f", kind->least_cosine);
        } else {
            table_cell(table, "-");
        }
        if (kind->is_quantized) {
            table_cell(table, "%g", kind->limit.cosine);
        } else {
            table_cell(table, "equal");
        }
    }
    table_end(table, stdout);
}

void verify_print(const struct weight_pairs *pairs, const struct judgement *judgement, bool has_all) {
    show(stdout, "%s, compared with %s\n\n", pairs->quantized->model.path, pairs->original->model.path);
    print_weights(judgement, has_all);
    print_kinds(judgement);
    if (judgement->failed == 0) {
        show(stdout, "\nall %zu weights pass\n", judgement->count);
    } else {
        show(stdout, "\n%zu of %zu weights fail\n", judgement->failed, judgement->count);
    }
}

/* ---- JSON ---- */

static void add_bins(yyjson_mut_doc *document, yyjson_mut_val *object, uint64_t exact,
                     const uint64_t histogram[ERROR_BINS]) {
    yyjson_mut_obj_add_uint(document, object, "exact", exact);
    yyjson_mut_val *const bins = yyjson_mut_obj_add_arr(document, object, "histogram");
    for (size_t i = 0; i < ERROR_BINS; ++i) {
        yyjson_mut_arr_add_uint(document, bins, histogram[i]);
    }
}

static void add_error(yyjson_mut_doc *document, yyjson_mut_val *object, const struct comparison *comparison) {
    const struct weight_error *const error = &comparison->error;
    yyjson_mut_obj_add_real(document, object, "sqnr_db", error->sqnr);
    yyjson_mut_obj_add_real(document, object, "cosine", error->cosine);
    yyjson_mut_obj_add_real(document, object, "relative_error", error->relative);
    yyjson_mut_obj_add_real(document, object, "rms", error->rms);
    yyjson_mut_obj_add_real(document, object, "largest_error", error->largest);
    if (error->largest_at < 0) {
        yyjson_mut_obj_add_null(document, object, "largest_at");
    } else {
        int64_t position[3];
        position_of(comparison, position);
        yyjson_mut_val *const at = yyjson_mut_obj_add_arr(document, object, "largest_at");
        for (int i = 0; i < 3; ++i) {
            yyjson_mut_arr_add_sint(document, at, position[i]);
        }
    }
    yyjson_mut_obj_add_uint(document, object, "original_not_finite", error->original_not_finite);
    yyjson_mut_obj_add_uint(document, object, "quantized_not_finite", error->quantized_not_finite);
    add_bins(document, object, error->exact, error->histogram);
}

static void add_sizes(yyjson_mut_doc *document, yyjson_mut_val *object, uint64_t elements, uint64_t bytes) {
    yyjson_mut_obj_add_uint(document, object, "elements", elements);
    yyjson_mut_obj_add_uint(document, object, "bytes", bytes);
    yyjson_mut_obj_add_real(document, object, "bits_per_weight",
                            elements == 0 ? (double)NAN : 8.0 * (double)bytes / (double)elements);
}

/* Of all weights of a kind in the quantized checkpoint. */
static void add_kind_sizes(yyjson_mut_doc *document, yyjson_mut_val *object, const struct judgement *judgement,
                           const char *kind) {
    uint64_t elements = 0;
    uint64_t bytes = 0;
    for (size_t i = 0; i < judgement->count; ++i) {
        const struct weight_pair *const pair = judgement->items[i].comparison->pair;
        if (strcmp(judgement->items[i].kind, kind) == 0 && pair->quantized.weight != NULL) {
            elements += pair_elements(pair);
            bytes += pair_bytes(pair);
        }
    }
    add_sizes(document, object, elements, bytes);
}

static uint64_t tensor_bytes(const struct checkpoint *checkpoint) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < checkpoint->model.tensor_count; ++i) {
        bytes += checkpoint->model.tensors[i].tensor->bytes;
    }
    return bytes;
}

static void add_kinds(yyjson_mut_doc *document, yyjson_mut_val *root, const struct judgement *judgement) {
    yyjson_mut_val *const kinds = yyjson_mut_obj_add_arr(document, root, "kinds");
    for (size_t i = 0; i < judgement->kind_count; ++i) {
        const struct kind_summary *const kind = &judgement->kinds[i];
        yyjson_mut_val *const object = yyjson_mut_arr_add_obj(document, kinds);
        json_add_text(document, object, "kind", kind->kind);
        yyjson_mut_obj_add_uint(document, object, "weights", kind->count);
        yyjson_mut_obj_add_uint(document, object, "failed", kind->failed);
        add_kind_sizes(document, object, judgement, kind->kind);
        const double nothing = (double)NAN;
        const bool is_measured = kind->measured != 0;
        yyjson_mut_obj_add_real(document, object, "least_sqnr_db", is_measured ? kind->least_sqnr : nothing);
        yyjson_mut_obj_add_real(document, object, "median_sqnr_db", is_measured ? kind->median_sqnr : nothing);
        yyjson_mut_obj_add_real(document, object, "least_cosine", is_measured ? kind->least_cosine : nothing);
        yyjson_mut_obj_add_real(document, object, "required_sqnr_db",
                                kind->is_quantized ? kind->limit.sqnr : nothing);
        yyjson_mut_obj_add_real(document, object, "required_cosine",
                                kind->is_quantized ? kind->limit.cosine : nothing);
        add_bins(document, object, kind->exact, kind->histogram);
    }
}

yyjson_mut_doc *verify_json(const struct weight_pairs *pairs, const struct judgement *judgement) {
    yyjson_mut_doc *const document = json_begin();
    yyjson_mut_val *const root = yyjson_mut_doc_get_root(document);
    json_add_text(document, root, "quantized", pairs->quantized->model.path);
    json_add_text(document, root, "original", pairs->original->model.path);
    yyjson_mut_obj_add_bool(document, root, "pass", judgement->failed == 0);
    yyjson_mut_obj_add_uint(document, root, "failed", judgement->failed);
    yyjson_mut_obj_add_uint(document, root, "quantized_bytes", tensor_bytes(pairs->quantized));
    yyjson_mut_obj_add_uint(document, root, "original_bytes", tensor_bytes(pairs->original));
    yyjson_mut_obj_add_sint(document, root, "histogram_first_octave", -ERROR_OCTAVES);
    yyjson_mut_obj_add_uint(document, root, "histogram_bins_per_octave", ERROR_BINS / (2 * ERROR_OCTAVES));
    add_kinds(document, root, judgement);
    yyjson_mut_val *const weights = yyjson_mut_obj_add_arr(document, root, "weights");
    for (size_t i = 0; i < judgement->count; ++i) {
        const struct comparison *const comparison = judgement->items[i].comparison;
        yyjson_mut_val *const weight = yyjson_mut_arr_add_obj(document, weights);
        json_add_text(document, weight, "name", comparison->pair->name);
        json_add_text(document, weight, "kind", judgement->items[i].kind);
        json_add_text(document, weight, "verdict", verdict_name(judgement->items[i].verdict));
        yyjson_mut_obj_add_bool(document, weight, "equal", comparison->is_equal);
        yyjson_mut_obj_add_sint(document, weight, "matrices", comparison->pair->matrices);
        add_sizes(document, weight, pair_elements(comparison->pair), pair_bytes(comparison->pair));
        if (comparison->has_error) {
            add_error(document, weight, comparison);
        }
    }
    return document;
}
