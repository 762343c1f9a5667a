/* cli/commands/command_inspect.c: `opaq inspect`: lists the contents of a checkpoint. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/commands/commands.h"
#include "cli/console/json_output.h"
#include "cli/console/number_text.h"
#include "cli/console/report_table.h"
#include "cli/console/terminal.h"
#include "cli/read/checkpoint.h"
#include "cli/read/config_values.h"
#include "cli/read/json.h"
#include "cli/report/inventory.h"
#include "cli/report/model_notes.h"

struct inspection {
    struct checkpoint checkpoint;
    struct inventory inventory;
    struct model_notes notes;
    struct tensor_use *uses;
};

static const char *layout_text(int layout) {
    return layout < 0 ? NULL : opaq_layout_name((enum opaq_layout)layout);
}

/* quant_method of the configuration, or ModelOpt's quant_algo if there is none. */
static const char *method_of(yyjson_val *quantization) {
    const char *const method = json_member_text(quantization, "quant_method");
    return method != NULL ? method : json_member_text(quantization, "quant_algo");
}

/* ---- tables ---- */

static void print_head(const struct inspection *found) {
    const struct model *const model = &found->checkpoint.model;
    yyjson_val *const quantization = model_quantization(model);
    const char *const layout = layout_text(found->checkpoint.weights.layout);
    show(stdout, "%s\n", model->path);
    show(stdout, "  layout   %s", layout == NULL ? "plain" : layout);
    const char *separator = " (";
    for (size_t i = 0; i < found->inventory.kind_count; ++i) {
        if (opaq_format_find(found->inventory.kinds[i].kind) >= 0) {
            show(stdout, "%s%s", separator, found->inventory.kinds[i].kind);
            separator = ", ";
        }
    }
    show(stdout, "%s\n", layout == NULL ? "" : ")");
    if (quantization != NULL) {
        const char *const method = method_of(quantization);
        const char *const format = json_member_text(quantization, "format");
        show(stdout, "  config   ");
        show_text(stdout, method == NULL ? "no quant_method" : method);
        show_text(stdout, format == NULL ? "" : ", ");
        show_text(stdout, format == NULL ? "" : format);
        show(stdout, "\n");
    }
}

static void print_files(const struct model *model) {
    struct report_table *const table = table_begin("file|tensors|size", "lrr");
    for (size_t i = 0; i < model->file_count; ++i) {
        table_cell(table, "%s", model->files[i].name);
        table_cell(table, "%zu", model->files[i].header.count);
        table_cell(table, "%s", size_text(model->files[i].input.bytes).text);
    }
    show(stdout, "\n");
    table_end(table, stdout);
}

static void tally_cells(struct report_table *table, const char *kind, const struct tally *tally) {
    table_cell(table, "%s", kind);
    table_cell(table, "%s", count_text(tally->count).text);
    table_cell(table, "%s", count_text(tally->elements).text);
    table_cell(table, "%s", size_text(tally->bytes).text);
    table_cell(table, "%s", bits_text(tally->bytes, tally->elements).text);
}

static void print_kinds(const struct inventory *inventory) {
    struct report_table *const table = table_begin("kind|weights|parameters|size|bits per weight", "lrrrr");
    for (size_t i = 0; i < inventory->kind_count; ++i) {
        tally_cells(table, inventory->kinds[i].kind, &inventory->kinds[i]);
    }
    if (inventory->quantized.count != 0) {
        tally_cells(table, "all quantized", &inventory->quantized);
    }
    tally_cells(table, "all", &inventory->all);
    show(stdout, "\n");
    table_end(table, stdout);
}

static void print_groups(const struct inventory *inventory) {
    struct report_table *const table = table_begin("modules|count|kind|shape", "lrll");
    for (size_t i = 0; i < inventory->group_count; ++i) {
        const struct like_group *const group = &inventory->groups[i];
        int64_t sizes[ST_RANK_LIMIT];
        const int rank = weight_shape(group->first, sizes);
        struct text shape = {0};
        shape_text_add(sizes, rank, &shape);
        table_cell(table, "%s", group->count == 1 ? group->first->name : group->pattern);
        table_cell(table, "%zu", group->count);
        table_cell(table, "%s", weight_kind(group->first));
        table_cell(table, "%s", text_get(&shape));
        text_free(&shape);
    }
    show(stdout, "\n");
    table_end(table, stdout);
}

static void print_tensors(const struct inspection *found) {
    const struct model *const model = &found->checkpoint.model;
    struct report_table *const table = table_begin("tensor|dtype|shape|bytes|file|is", "lllrll");
    for (size_t i = 0; i < model->tensor_count; ++i) {
        const struct st_tensor *const tensor = model->tensors[i].tensor;
        const struct tensor_use *const use = &found->uses[i];
        struct text shape = {0};
        shape_text_add(tensor->shape, tensor->rank, &shape);
        table_cell(table, "%s", tensor->name);
        table_cell(table, "%s", st_dtype_name(tensor->dtype));
        table_cell(table, "%s", text_get(&shape));
        table_cell(table, "%" PRIu64, tensor->bytes);
        table_cell(table, "%s", model->files[model->tensors[i].file].name);
        if (use->role == ROLE_PLAIN) {
            table_cell(table, "plain");
        } else {
            table_cell(table, "%s of %s, %s %s", tensor_role_name(use->role), use->weight->name,
                       opaq_layout_name(use->weight->scheme->layout), weight_kind(use->weight));
        }
        text_free(&shape);
    }
    show(stdout, "\n");
    table_end(table, stdout);
}

static void print_notes(const struct model_notes *notes) {
    for (size_t i = 0; i < notes->count; ++i) {
        show(stdout, "%snote: ", i == 0 ? "\n" : "");
        show_text(stdout, notes->lines[i]);
        show(stdout, "\n");
    }
}

/* ---- JSON ---- */

static void add_numbers(yyjson_mut_doc *document, yyjson_mut_val *object, const struct tally *tally) {
    yyjson_mut_obj_add_uint(document, object, "parameters", tally->elements);
    yyjson_mut_obj_add_uint(document, object, "bytes", tally->bytes);
    if (tally->elements == 0) {
        yyjson_mut_obj_add_null(document, object, "bits_per_weight");
    } else {
        yyjson_mut_obj_add_real(document, object, "bits_per_weight",
                                (double)tally->bytes * 8 / (double)tally->elements);
    }
}

static void add_totals(yyjson_mut_doc *document, yyjson_mut_val *root, const struct inspection *found) {
    const struct inventory *const inventory = &found->inventory;
    yyjson_mut_val *const totals = yyjson_mut_obj_add_obj(document, root, "totals");
    yyjson_mut_obj_add_uint(document, totals, "tensors", found->checkpoint.model.tensor_count);
    yyjson_mut_obj_add_uint(document, totals, "weights", inventory->all.count);
    add_numbers(document, totals, &inventory->all);
    yyjson_mut_val *const quantized = yyjson_mut_obj_add_obj(document, totals, "quantized");
    yyjson_mut_obj_add_uint(document, quantized, "weights", inventory->quantized.count);
    add_numbers(document, quantized, &inventory->quantized);
    yyjson_mut_val *const kinds = yyjson_mut_obj_add_arr(document, root, "kinds");
    for (size_t i = 0; i < inventory->kind_count; ++i) {
        yyjson_mut_val *const kind = yyjson_mut_arr_add_obj(document, kinds);
        json_add_text(document, kind, "kind", inventory->kinds[i].kind);
        yyjson_mut_obj_add_uint(document, kind, "weights", inventory->kinds[i].count);
        add_numbers(document, kind, &inventory->kinds[i]);
    }
}

static void add_groups(yyjson_mut_doc *document, yyjson_mut_val *root, const struct inventory *inventory) {
    yyjson_mut_val *const groups = yyjson_mut_obj_add_arr(document, root, "groups");
    for (size_t i = 0; i < inventory->group_count; ++i) {
        yyjson_mut_val *const group = yyjson_mut_arr_add_obj(document, groups);
        int64_t shape[ST_RANK_LIMIT];
        const int rank = weight_shape(inventory->groups[i].first, shape);
        json_add_text(document, group, "pattern", inventory->groups[i].pattern);
        json_add_text(document, group, "first", inventory->groups[i].first->name);
        yyjson_mut_obj_add_uint(document, group, "weights", inventory->groups[i].count);
        json_add_text(document, group, "kind", weight_kind(inventory->groups[i].first));
        json_add_shape(document, group, shape, rank);
    }
}

static void add_tensors(yyjson_mut_doc *document, yyjson_mut_val *root, const struct inspection *found) {
    const struct model *const model = &found->checkpoint.model;
    yyjson_mut_val *const tensors = yyjson_mut_obj_add_arr(document, root, "tensors");
    for (size_t i = 0; i < model->tensor_count; ++i) {
        const struct st_tensor *const tensor = model->tensors[i].tensor;
        const struct tensor_use *const use = &found->uses[i];
        const bool is_plain = use->role == ROLE_PLAIN;
        yyjson_mut_val *const object = yyjson_mut_arr_add_obj(document, tensors);
        json_add_text(document, object, "name", tensor->name);
        json_add_text(document, object, "dtype", st_dtype_name(tensor->dtype));
        json_add_shape(document, object, tensor->shape, tensor->rank);
        yyjson_mut_obj_add_uint(document, object, "bytes", tensor->bytes);
        json_add_text(document, object, "file", model->files[model->tensors[i].file].name);
        json_add_text(document, object, "role", tensor_role_name(use->role));
        json_add_text(document, object, "weight", use->weight->name);
        json_add_text(document, object, "layout",
                      is_plain ? NULL : layout_text((int)use->weight->scheme->layout));
        json_add_text(document, object, "format", is_plain ? NULL : weight_kind(use->weight));
    }
}

static void add_head(yyjson_mut_doc *document, yyjson_mut_val *root, const struct inspection *found) {
    const struct model *const model = &found->checkpoint.model;
    yyjson_val *const quantization = model_quantization(model);
    json_add_text(document, root, "path", model->path);
    json_add_text(document, root, "layout", layout_text(found->checkpoint.weights.layout));
    yyjson_mut_val *const formats = yyjson_mut_obj_add_arr(document, root, "formats");
    for (size_t i = 0; i < found->inventory.kind_count; ++i) {
        if (opaq_format_find(found->inventory.kinds[i].kind) >= 0) {
            yyjson_mut_arr_add_strcpy(document, formats, found->inventory.kinds[i].kind);
        }
    }
    if (quantization == NULL) {
        yyjson_mut_obj_add_null(document, root, "config");
    } else {
        yyjson_mut_val *const config = yyjson_mut_obj_add_obj(document, root, "config");
        json_add_text(document, config, "method", method_of(quantization));
        json_add_text(document, config, "format", json_member_text(quantization, "format"));
        json_add_text(document, config, "layout", layout_text(layout_of_config(quantization)));
    }
    yyjson_mut_val *const files = yyjson_mut_obj_add_arr(document, root, "files");
    for (size_t i = 0; i < model->file_count; ++i) {
        yyjson_mut_val *const file = yyjson_mut_arr_add_obj(document, files);
        json_add_text(document, file, "name", model->files[i].name);
        yyjson_mut_obj_add_uint(document, file, "tensors", model->files[i].header.count);
        yyjson_mut_obj_add_uint(document, file, "bytes", model->files[i].input.bytes);
    }
}

static enum exit_code print_json(const struct command_call *call, const struct inspection *found,
                                 bool has_tensors) {
    yyjson_mut_doc *const document = json_begin();
    yyjson_mut_val *const root = yyjson_mut_doc_get_root(document);
    add_head(document, root, found);
    add_totals(document, root, found);
    add_groups(document, root, &found->inventory);
    if (has_tensors) {
        add_tensors(document, root, found);
    }
    yyjson_mut_val *const notes = yyjson_mut_obj_add_arr(document, root, "notes");
    for (size_t i = 0; i < found->notes.count; ++i) {
        yyjson_mut_arr_add_strcpy(document, notes, found->notes.lines[i]);
    }
    return json_finish(call, document);
}

static enum exit_code print_all(const struct command_call *call, const struct inspection *found) {
    const bool has_tensors = call_has(call, "tensors");
    if (call_has(call, "json")) {
        return print_json(call, found, has_tensors);
    }
    print_head(found);
    print_files(&found->checkpoint.model);
    print_kinds(&found->inventory);
    if (has_tensors) {
        print_tensors(found);
    } else {
        print_groups(&found->inventory);
    }
    print_notes(&found->notes);
    return EXIT_FINE;
}

enum exit_code command_inspect(const struct command_call *call) {
    struct inspection found;
    if (!checkpoint_open(call, call->arguments[0], &found.checkpoint)) {
        return EXIT_TROUBLE;
    }
    struct opaq_error error;
    enum exit_code code = EXIT_TROUBLE;
    if (model_notes_make(&found.checkpoint, &found.notes, &error) != OPAQ_OK) {
        complain(call, "%s", error.text);
    } else if (model_check(&found.checkpoint.model, &error) != OPAQ_OK) {
        model_notes_free(&found.notes);
        complain(call, "%s", error.text);
    } else {
        inventory_make(&found.checkpoint.weights, &found.inventory);
        found.uses = checkpoint_uses(&found.checkpoint);
        code = print_all(call, &found);
        free(found.uses);
        inventory_free(&found.inventory);
        model_notes_free(&found.notes);
    }
    checkpoint_close(&found.checkpoint);
    return code;
}
