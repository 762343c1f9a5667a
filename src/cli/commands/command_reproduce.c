/* cli/commands/command_reproduce.c: `opaq reproduce`: hashes of this machine's results, to compare machines. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/commands/commands.h"
#include "cli/console/json_output.h"
#include "cli/report/reproduction.h"
#include "opaq/cpu.h"
#include "opaq/parallel.h"
#include "opaq/version.h"

enum { HASH_TEXT_BYTES = 17, FEATURES_BYTES = 256 };

static void hash_text(uint64_t hash, char text[HASH_TEXT_BYTES]) {
    (void)snprintf(text, HASH_TEXT_BYTES, "%016llx", (unsigned long long)hash);
}

static void print_part(const struct reproduction *reproduction, bool is_portable, const char *title) {
    char text[HASH_TEXT_BYTES];
    for (size_t i = 0; i < reproduction->count; ++i) {
        const struct reproduction_result *const result = &reproduction->results[i];
        if (result->is_portable == is_portable) {
            hash_text(result->hash, text);
            printf("%s  %-15s %s\n", text, result->operation, result->what);
        }
    }
    hash_text(reproduction_hash(reproduction, is_portable), text);
    printf("%s  %s\n", text, title);
}

static void add_part(yyjson_mut_doc *document, const char *key, const struct reproduction *reproduction,
                     bool is_portable) {
    char text[HASH_TEXT_BYTES];
    yyjson_mut_val *const part = yyjson_mut_obj_add_obj(document, yyjson_mut_doc_get_root(document), key);
    hash_text(reproduction_hash(reproduction, is_portable), text);
    json_add_text(document, part, "hash", text);
    yyjson_mut_val *const results = yyjson_mut_obj_add_arr(document, part, "results");
    for (size_t i = 0; i < reproduction->count; ++i) {
        const struct reproduction_result *const result = &reproduction->results[i];
        if (result->is_portable == is_portable) {
            yyjson_mut_val *const entry = yyjson_mut_arr_add_obj(document, results);
            json_add_text(document, entry, "operation", result->operation);
            json_add_text(document, entry, "what", result->what);
            hash_text(result->hash, text);
            json_add_text(document, entry, "hash", text);
        }
    }
}

static enum exit_code print_json(const struct command_call *call, const struct reproduction *reproduction,
                                 const char *features) {
    yyjson_mut_doc *const document = json_begin();
    yyjson_mut_val *const root = yyjson_mut_doc_get_root(document);
    json_add_text(document, root, "version", opaq_version());
    json_add_text(document, root, "cpu", features);
    add_part(document, "same_everywhere", reproduction, true);
    add_part(document, "may_differ", reproduction, false);
    return json_finish(call, document);
}

static enum exit_code compare(const struct command_call *call, const struct reproduction *reproduction) {
    const char *const expected = call_value(call, "expect", NULL);
    char text[HASH_TEXT_BYTES];
    hash_text(reproduction_hash(reproduction, true), text);
    if (expected == NULL || strcmp(expected, text) == 0) {
        return EXIT_FINE;
    }
    complain(call, "the hash of the part that is the same on every processor is %s, expected %s", text,
             expected);
    return EXIT_NO;
}

enum exit_code command_reproduce(const struct command_call *call) {
    long long threads = 0;
    if (!call_integer(call, "threads", 1, 1024, &threads)) {
        return EXIT_USAGE;
    }
    char features[FEATURES_BYTES];
    (void)opaq_cpu_describe(opaq_cpu_features(), features, sizeof features);
    struct reproduction reproduction = {0};
    struct opaq_pool *pool = NULL;
    struct opaq_error error;
    enum exit_code code = EXIT_TROUBLE;
    if (opaq_pool_create((int)threads, &pool, &error) == OPAQ_OK) {
        const struct opaq_parallel parallel = opaq_pool_parallel(pool);
        const struct opaq_execution execution = {.parallel = &parallel};
        if (reproduction_compute(&execution, &reproduction, &error) == OPAQ_OK) {
            code = EXIT_FINE;
        }
    }
    if (code != EXIT_FINE) {
        complain(call, "%s", error.text);
    } else if (call_has(call, "json")) {
        code = print_json(call, &reproduction, features);
    } else {
        print_part(&reproduction, true, "all of these: the same on every processor");
        printf("\n");
        print_part(&reproduction, false, "all of these: weights in tiles, may differ by instruction set");
        printf("\nopaq %s, %s\n", opaq_version(), features);
    }
    if (code == EXIT_FINE) {
        code = compare(call, &reproduction);
    }
    reproduction_release(&reproduction);
    opaq_pool_destroy(pool);
    return code;
}
