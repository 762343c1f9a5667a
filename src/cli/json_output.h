/* cli/json_output.h: JSON that a command prints. */
#ifndef OPAQ_CLI_JSON_OUTPUT_H
#define OPAQ_CLI_JSON_OUTPUT_H

#include <yyjson.h>

#include "cli/command.h"

/* A document whose root is an object; never NULL. */
yyjson_mut_doc *json_begin(void);

/* Prints it to stdout, in lines, and releases it. */
enum exit_code json_finish(const struct command_call *call, yyjson_mut_doc *document);

#endif
