/* cli/commands/command_version.c: `opaq version`. */
#include <stdio.h>

#include "cli/commands/commands.h"
#include "cli/commands/machine.h"
#include "cli/console/json_output.h"
#include "opaq/kernel.h"
#include "opaq/version.h"

static enum exit_code print_json(const struct command_call *call) {
    yyjson_mut_doc *const document = json_begin();
    machine_add_json(document, yyjson_mut_doc_get_root(document));
    return json_finish(call, document);
}

enum exit_code command_version(const struct command_call *call) {
    if (call_has(call, "json")) {
        return print_json(call);
    }
    char features[256];
    printf("opaq %s\n", opaq_version());
    printf("instruction sets: %s\n", machine_instruction_sets(features, sizeof features));
    printf("processors: %d\n", machine_processors());
    if (opaq_kernel_forced()[0] != '\0') {
        printf("forced kernels: %s\n", opaq_kernel_forced());
    }
    return EXIT_FINE;
}
