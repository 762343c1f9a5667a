/* cli/commands/machine.h: this machine, as `opaq version` and `opaq doctor` print it. */
#ifndef OPAQ_CLI_COMMANDS_MACHINE_H
#define OPAQ_CLI_COMMANDS_MACHINE_H

#include <yyjson.h>

/* Default number of threads of a pool; 1 if none can be created. */
int machine_processors(void);

/* "avx2 avx512 ...", or a sentence if there are none. */
const char *machine_instruction_sets(char *buffer, size_t capacity);

/* Adds version, instruction_sets, processors and forced_kernels. */
void machine_add_json(yyjson_mut_doc *document, yyjson_mut_val *object);

#endif
