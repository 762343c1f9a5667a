/* cli/commands/command_version.c: `opaq version`. */
#include <stdio.h>

#include "cli/commands/commands.h"
#include "cli/console/json_output.h"
#include "opaq/cpu.h"
#include "opaq/kernel.h"
#include "opaq/parallel.h"
#include "opaq/version.h"

/* Default number of threads of a pool; 1 if none can be created. */
static int processors(void) {
    struct opaq_pool *pool = NULL;
    if (opaq_pool_create(0, &pool, NULL) != OPAQ_OK) {
        return 1;
    }
    const int count = opaq_pool_threads(pool);
    opaq_pool_destroy(pool);
    return count;
}

static enum exit_code print_json(const struct command_call *call) {
    yyjson_mut_doc *const document = json_begin();
    yyjson_mut_val *const root = yyjson_mut_doc_get_root(document);
    yyjson_mut_obj_add_str(document, root, "version", opaq_version());
    yyjson_mut_val *const features = yyjson_mut_obj_add_arr(document, root, "instruction_sets");
    for (uint32_t bit = 1; bit != 0; bit <<= 1) {
        char name[32];
        if ((opaq_cpu_features() & bit) != 0 && opaq_cpu_describe(bit, name, sizeof name) < sizeof name) {
            yyjson_mut_arr_add_strcpy(document, features, name);
        }
    }
    yyjson_mut_obj_add_int(document, root, "processors", processors());
    yyjson_mut_obj_add_str(document, root, "forced_kernels", opaq_kernel_forced());
    return json_finish(call, document);
}

enum exit_code command_version(const struct command_call *call) {
    if (call_has(call, "json")) {
        return print_json(call);
    }
    char features[256];
    const size_t length = opaq_cpu_describe(opaq_cpu_features(), features, sizeof features);
    printf("opaq %s\n", opaq_version());
    printf("instruction sets: %s\n", length == 0 ? "none that kernels are written for" : features);
    printf("processors: %d\n", processors());
    if (opaq_kernel_forced()[0] != '\0') {
        printf("forced kernels: %s\n", opaq_kernel_forced());
    }
    return EXIT_FINE;
}
