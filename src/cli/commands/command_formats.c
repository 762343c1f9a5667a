/* cli/commands/command_formats.c: `opaq formats`, from the library's tables of formats and layouts. */
#include <stdio.h>

#include "cli/cli_memory.h"
#include "cli/commands/commands.h"
#include "cli/console/json_output.h"
#include "opaq/format.h"
#include "opaq/layout.h"
#include "opaq/proto.h"

enum { EXAMPLE_SIZE = 4096 };

/* Bits per weight, scales included, in a square matrix of EXAMPLE_SIZE; 0 on an error. */
static double bits_per_weight(enum opaq_format format) {
    static const int64_t shape[2] = {EXAMPLE_SIZE, EXAMPLE_SIZE};
    struct opaq_spec spec;
    struct opaq_proto proto;
    size_t bytes = 0;
    if (opaq_spec_make(format, &spec, NULL) != OPAQ_OK ||
        opaq_proto_make(shape, 2, OPAQ_BF16, &spec, (struct opaq_device){OPAQ_DEVICE_CPU, 0}, &proto, NULL) !=
            OPAQ_OK ||
        opaq_proto_bytes(&proto, &bytes, NULL) != OPAQ_OK) {
        return 0.0;
    }
    return 8.0 * (double)bytes / ((double)EXAMPLE_SIZE * EXAMPLE_SIZE);
}

/* Element type of the rowwise scales. */
static const char *scale_name(const struct opaq_format_row *row) {
    for (int32_t i = 0; i < row->buffer_count; ++i) {
        const struct opaq_buffer_row *const buffer = &row->buffers[i];
        if (buffer->role == OPAQ_ROLE_SCALE && (buffer->usage & OPAQ_ROWWISE) != 0) {
            return opaq_element_info((enum opaq_element)buffer->element)->name;
        }
    }
    return "";
}

static bool has_tensor_float(const struct opaq_format_row *row) {
    for (int32_t i = 0; i < row->buffer_count; ++i) {
        if (row->buffers[i].role == OPAQ_ROLE_AMAX) {
            return true;
        }
    }
    return false;
}

static void print_block(const struct opaq_format_row *row, struct text *text) {
    if (row->block_rows == 0) {
        text_print(text, "tensor");
    } else if (row->block_columns == 0) {
        text_print(text, "row");
    } else {
        text_print(text, "%dx%d", (int)row->block_rows, (int)row->block_columns);
    }
}

/* Lists of a format, by index, NULL after the last; the table and the JSON iterate over them. */
static const char *element_of(const struct opaq_format_row *row, int index) {
    for (int element = 0; element < OPAQ_ELEMENT_COUNT; ++element) {
        if ((row->elements & 1u << element) != 0 && index-- == 0) {
            return opaq_element_info((enum opaq_element)element)->name;
        }
    }
    return NULL;
}

static const char *rule_of(const struct opaq_format_row *row, int index) {
    for (int rule = 0; rule < OPAQ_RULE_COUNT; ++rule) {
        if ((row->rules & 1u << rule) != 0 && index-- == 0) {
            return opaq_rule_name((enum opaq_rule)rule);
        }
    }
    return NULL;
}

static const char *layout_of(const struct opaq_format_row *row, int index) {
    for (int layout = 0; layout < OPAQ_LAYOUT_COUNT; ++layout) {
        if (opaq_layout_find((enum opaq_layout)layout, row->format) != NULL && index-- == 0) {
            return opaq_layout_name((enum opaq_layout)layout);
        }
    }
    return NULL;
}

typedef const char *list_function(const struct opaq_format_row *row, int index);

static void print_list(const struct opaq_format_row *row, list_function *name_at, struct text *text) {
    const char *name;
    for (int i = 0; (name = name_at(row, i)) != NULL; ++i) {
        text_print(text, "%s%s", i == 0 ? "" : ", ", name);
    }
    if (name_at(row, 0) == NULL) {
        text_print(text, "none");
    }
}

static void add_list(yyjson_mut_doc *document, yyjson_mut_val *object, const char *key,
                     const struct opaq_format_row *row, list_function *name_at) {
    yyjson_mut_val *const array = yyjson_mut_obj_add_arr(document, object, key);
    const char *name;
    for (int i = 0; (name = name_at(row, i)) != NULL; ++i) {
        yyjson_mut_arr_add_str(document, array, name);
    }
}

static enum exit_code print_json(const struct command_call *call) {
    yyjson_mut_doc *const document = json_begin();
    yyjson_mut_val *const list = yyjson_mut_obj_add_arr(document, yyjson_mut_doc_get_root(document), "formats");
    for (int format = 0; format < OPAQ_FORMAT_COUNT; ++format) {
        const struct opaq_format_row *const row = opaq_format_row((enum opaq_format)format);
        yyjson_mut_val *const entry = yyjson_mut_arr_add_obj(document, list);
        yyjson_mut_obj_add_str(document, entry, "name", row->name);
        yyjson_mut_obj_add_real(document, entry, "bits_per_weight", bits_per_weight(row->format));
        yyjson_mut_obj_add_int(document, entry, "block_rows", row->block_rows);
        yyjson_mut_obj_add_int(document, entry, "block_columns", row->block_columns);
        add_list(document, entry, "elements", row, element_of);
        yyjson_mut_obj_add_str(document, entry, "scale", scale_name(row));
        yyjson_mut_obj_add_bool(document, entry, "has_tensor_float", has_tensor_float(row));
        add_list(document, entry, "rules", row, rule_of);
        add_list(document, entry, "layouts", row, layout_of);
    }
    return json_finish(call, document);
}

static void print_shape_line(const struct opaq_format_row *row) {
    struct text block = {NULL, 0, 0};
    struct text codes = {NULL, 0, 0};
    struct text scales = {NULL, 0, 0};
    struct text layouts = {NULL, 0, 0};
    print_block(row, &block);
    text_print(&scales, "%s%s", scale_name(row), has_tensor_float(row) ? ", f32" : "");
    print_list(row, element_of, &codes);
    print_list(row, layout_of, &layouts);
    printf("%-9s %6.3f  %-9s %-11s %-11s %s\n", row->name, bits_per_weight(row->format), text_get(&block),
           text_get(&codes), text_get(&scales), text_get(&layouts));
    text_free(&block);
    text_free(&codes);
    text_free(&scales);
    text_free(&layouts);
}

static void print_rules_line(const struct opaq_format_row *row) {
    struct text rules = {NULL, 0, 0};
    print_list(row, rule_of, &rules);
    printf("%-9s %s\n", row->name, text_get(&rules));
    text_free(&rules);
}

enum exit_code command_formats(const struct command_call *call) {
    if (call_has(call, "json")) {
        return print_json(call);
    }
    printf("%-9s %6s  %-9s %-11s %-11s %s\n", "format", "bits", "block", "codes", "scales", "layouts");
    for (int format = 0; format < OPAQ_FORMAT_COUNT; ++format) {
        print_shape_line(opaq_format_row((enum opaq_format)format));
    }
    printf("\n%-9s %s\n", "format", "rules of its scales");
    for (int format = 0; format < OPAQ_FORMAT_COUNT; ++format) {
        print_rules_line(opaq_format_row((enum opaq_format)format));
    }
    return EXIT_FINE;
}
