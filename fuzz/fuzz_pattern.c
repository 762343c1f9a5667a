/* fuzz_pattern.c: a pattern, a zero, and a name. Every accepted pattern is matched, and every error has a
 * message. */
#include <stdlib.h>
#include <string.h>

#include "opaq/opaq.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char *const text = malloc(size + 2);
    struct opaq_patterns *list = NULL;
    struct opaq_error error = {OPAQ_OK, ""};
    if (text == NULL || opaq_patterns_create(&list, &error) != OPAQ_OK) {
        abort();
    }
    if (size != 0) {
        memcpy(text, data, size);
    }
    text[size] = text[size + 1] = '\0';
    const char *const name = text + strlen(text) + 1;
    const enum opaq_status status = opaq_patterns_add(list, text, &error);
    const int64_t found = opaq_patterns_find(list, strlen(text) < size ? name : "model.layers.0.mlp");
    if ((status != OPAQ_OK && (error.text[0] == '\0' || found != -1)) || found > 0) {
        abort();
    }
    opaq_patterns_destroy(list);
    free(text);
    return 0;
}
