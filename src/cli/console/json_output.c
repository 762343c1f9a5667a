/* cli/console/json_output.c: see json_output.h. */
#include "cli/console/json_output.h"

#include <stdio.h>
#include <stdlib.h>

yyjson_mut_doc *json_begin(void) {
    yyjson_mut_doc *const document = yyjson_mut_doc_new(NULL);
    if (document == NULL) {
        (void)fprintf(stderr, "opaq: out of memory: a JSON document\n");
        exit(EXIT_TROUBLE);
    }
    yyjson_mut_doc_set_root(document, yyjson_mut_obj(document));
    return document;
}

char *json_print(const struct command_call *call, yyjson_mut_doc *document, bool is_pretty, size_t *length) {
    yyjson_write_err error = {0, NULL};
    /* A path of the command line may be invalid UTF-8; names in a checkpoint may contain characters that terminals
     * interpret (U+009B). */
    const yyjson_write_flag flags =
        YYJSON_WRITE_INF_AND_NAN_AS_NULL | YYJSON_WRITE_ALLOW_INVALID_UNICODE | YYJSON_WRITE_ESCAPE_UNICODE |
        (is_pretty ? YYJSON_WRITE_PRETTY_TWO_SPACES | YYJSON_WRITE_NEWLINE_AT_END : 0);
    char *const text = yyjson_mut_write_opts(document, flags, NULL, length, &error);
    yyjson_mut_doc_free(document);
    if (text == NULL) {
        complain(call, "cannot write JSON: %s", error.msg);
    }
    return text;
}

enum exit_code json_finish(const struct command_call *call, yyjson_mut_doc *document) {
    size_t length = 0;
    char *const text = json_print(call, document, true, &length);
    if (text == NULL) {
        return EXIT_TROUBLE;
    }
    (void)fwrite(text, 1, length, stdout);
    free(text);
    return EXIT_FINE;
}

void json_add_text(yyjson_mut_doc *document, yyjson_mut_val *object, const char *key, const char *text) {
    yyjson_mut_val *const value = text == NULL ? yyjson_mut_null(document) : yyjson_mut_strcpy(document, text);
    yyjson_mut_obj_add_val(document, object, key, value);
}

void json_add_shape(yyjson_mut_doc *document, yyjson_mut_val *object, const int64_t *shape, int rank) {
    yyjson_mut_val *const sizes = yyjson_mut_obj_add_arr(document, object, "shape");
    for (int i = 0; i < rank; ++i) {
        yyjson_mut_arr_add_sint(document, sizes, shape[i]);
    }
}
