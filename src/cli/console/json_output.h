/* cli/console/json_output.h: JSON that a command prints. */
#ifndef OPAQ_CLI_CONSOLE_JSON_OUTPUT_H
#define OPAQ_CLI_CONSOLE_JSON_OUTPUT_H

#include <stdint.h>
#include <yyjson.h>

#include "cli/command.h"

/* A new document whose root is an object; never NULL. */
yyjson_mut_doc *json_begin(void);

/* The document as ASCII text, released with free(); infinities and NaNs become null. Releases the document. Returns
 * NULL after a message on stderr. */
char *json_print(const struct command_call *call, yyjson_mut_doc *document, bool is_pretty, size_t *length);

/* Prints the document to stdout, indented, and releases it. */
enum exit_code json_finish(const struct command_call *call, yyjson_mut_doc *document);

/* Add a member; texts are copied, NULL becomes null. */
void json_add_text(yyjson_mut_doc *document, yyjson_mut_val *object, const char *key, const char *text);
void json_add_shape(yyjson_mut_doc *document, yyjson_mut_val *object, const int64_t *shape, int rank);

#endif
