/* cli/commands/machine.c: see machine.h. */
#include "cli/commands/machine.h"

#include "opaq/cpu.h"
#include "opaq/kernel.h"
#include "opaq/parallel.h"
#include "opaq/version.h"

int machine_processors(void) {
    struct opaq_pool *pool = NULL;
    if (opaq_pool_create(0, &pool, NULL) != OPAQ_OK) {
        return 1;
    }
    const int count = opaq_pool_threads(pool);
    opaq_pool_destroy(pool);
    return count;
}

const char *machine_instruction_sets(char *buffer, size_t capacity) {
    return opaq_cpu_describe(opaq_cpu_features(), buffer, capacity) == 0 ? "none that kernels are written for"
                                                                         : buffer;
}

void machine_add_json(yyjson_mut_doc *document, yyjson_mut_val *object) {
    yyjson_mut_obj_add_str(document, object, "version", opaq_version());
    yyjson_mut_val *const features = yyjson_mut_obj_add_arr(document, object, "instruction_sets");
    for (uint32_t bit = 1; bit != 0; bit <<= 1) {
        char name[32];
        if ((opaq_cpu_features() & bit) != 0 && opaq_cpu_describe(bit, name, sizeof name) < sizeof name) {
            yyjson_mut_arr_add_strcpy(document, features, name);
        }
    }
    yyjson_mut_obj_add_int(document, object, "processors", machine_processors());
    yyjson_mut_obj_add_str(document, object, "forced_kernels", opaq_kernel_forced());
}
