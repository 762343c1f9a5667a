/* cli/json_output.c: see json_output.h. */
#include "cli/json_output.h"

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

enum exit_code json_finish(const struct command_call *call, yyjson_mut_doc *document) {
    yyjson_write_err error = {0, NULL};
    size_t length = 0;
    char *const text = yyjson_mut_write_opts(
        document, YYJSON_WRITE_PRETTY_TWO_SPACES | YYJSON_WRITE_NEWLINE_AT_END, NULL, &length, &error);
    yyjson_mut_doc_free(document);
    if (text == NULL) {
        complain(call, "cannot write JSON: %s", error.msg);
        return EXIT_TROUBLE;
    }
    (void)fwrite(text, 1, length, stdout);
    free(text);
    return EXIT_FINE;
}
