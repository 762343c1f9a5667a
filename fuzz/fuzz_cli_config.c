/* fuzz_cli_config.c: any bytes as config.json and as hf_quant_config.json. Runs all code that reads a
 * configuration without writing files, with weights that the configuration may name. */
#include "cli/read/config_values.h"
#include "cli/read/json.h"
#include "cli/read/name_pattern.h"
#include "cli/read/weight_slice.h"
#include "fuzz_cli.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char file[] = "config.json";

/* Stacks of experts that some configurations declare as transposed. */
static const struct st_tensor stacks[] = {
    {"m.mlp.experts.down_proj", ST_BF16, 3, {2, 64, 32}, 0, 8192},
    {"m.mlp.experts.gate_up_proj", ST_BF16, 3, {2, 64, 64}, 8192, 16384},
    {"m.mlp.experts.w13", ST_F32, 3, {3, 32, 64}, 24576, 24576},
    {"m.x.weight", ST_F8_E4M3, 2, {128, 128}, 49152, 16384},
    {"m.x.weight_scale", ST_F32, 2, {1, 1}, 65536, 4},
};
enum { STACKS = sizeof stacks / sizeof stacks[0] };

static void expect_slices(const struct model *model, const struct weight *weight) {
    struct weight_slice *slices = NULL;
    const size_t count = weight_slices(model, weight, &slices);
    int64_t elements = 0;
    for (size_t i = 0; i < count; ++i) {
        expect(slices[i].rows > 0 && slices[i].columns > 0 && slices[i].first >= 0);
        expect(slices[i].matrix >= 0 && slices[i].matrix < weight->stack && strlen(slices[i].name) > 0);
        elements += slices[i].rows * slices[i].columns;
    }
    expect(count == 0 || elements == weight->stack * weight->rows * weight->columns);
    weight_slices_free(slices, count);
}

/* Patterns of configurations, some of them regular expressions: matching is fast, and a match is an entry of
 * the list. */
static void expect_ignored(yyjson_val *quantization) {
    struct ignore_list list;
    ignore_list_make(quantization, &list);
    for (size_t i = 0; i < STACKS; ++i) {
        const char *const found = ignore_list_find(&list, stacks[i].name);
        expect(found == NULL || list.patterns.count != 0);
    }
    ignore_list_free(&list);
}

static void use(yyjson_doc *document) {
    static char path[] = "model";
    struct model_tensor tensors[STACKS];
    struct opaq_error error;
    for (size_t i = 0; i < STACKS; ++i) {
        tensors[i] = (struct model_tensor){&stacks[i], 0};
    }
    for (int kind = 0; kind < 2; ++kind) {
        const struct model model = {.path = path,
                                    .tensors = tensors,
                                    .tensor_count = STACKS,
                                    .config = kind == 0 ? document : NULL,
                                    .modelopt = kind == 0 ? NULL : document};
        const int layout = layout_of_config(model_quantization(&model));
        expect(layout >= -1 && layout < OPAQ_LAYOUT_COUNT);
        expect_ignored(model_quantization(&model));
        struct weights weights;
        expect(weights_find(&model, &weights, &error) == OPAQ_OK && weights.count == STACKS - 1);
        for (size_t i = 0; i < weights.count; ++i) {
            expect_slices(&model, &weights.items[i]);
        }
        weights_free(&weights);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct opaq_error error;
    yyjson_doc *document = NULL;
    char *const bytes = exactly(data, size);
    const enum opaq_status status = json_read(bytes, size, file, &document, &error);
    if (status != OPAQ_OK) {
        expect_sentence(status, &error, file);
    } else {
        use(document);
    }
    yyjson_doc_free(document);
    free(bytes);
    return 0;
}
