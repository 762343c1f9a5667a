/* fuzz_cli_index.c: any bytes as an index of a checkpoint. An accepted index only names files of the folder. */
#include "cli/read/json.h"
#include "cli/read/model.h"
#include "fuzz_cli.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char file[] = "index.json";

static void expect_names(yyjson_doc *index) {
    yyjson_val *const map = yyjson_obj_get(yyjson_doc_get_root(index), "weight_map");
    size_t at = 0;
    size_t count = 0;
    yyjson_val *key = NULL;
    yyjson_val *value = NULL;
    yyjson_obj_foreach(map, at, count, key, value) {
        const char *const name = yyjson_get_str(value);
        expect(json_is_clean(key) && json_is_clean(value) && folder_allows(name));
        expect(strlen(name) == yyjson_get_len(value) && strchr(name, '/') == NULL && strcmp(name, "..") != 0);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct opaq_error error;
    yyjson_doc *index = NULL;
    char *const bytes = exactly(data, size);
    enum opaq_status status = json_read(bytes, size, file, &index, &error);
    if (status == OPAQ_OK) {
        status = model_check_index(index, file, &error);
    }
    if (status != OPAQ_OK) {
        expect_sentence(status, &error, file);
    } else {
        expect_names(index);
    }
    yyjson_doc_free(index);
    free(bytes);
    return 0;
}
