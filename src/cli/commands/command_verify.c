/* cli/commands/command_verify.c: `opaq verify`: compares a quantized checkpoint with the original. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/commands/commands.h"
#include "cli/console/json_output.h"
#include "cli/read/checkpoint.h"
#include "cli/report/verify_report.h"
#include "cli/write/output_file.h"

enum { MOST_THREADS = 1024, MOST_DECIBELS = 1000 };

/* Writes the page; if `page` is NULL, only checks whether it can be written. */
static enum opaq_status write_page(const char *path, const struct text *page, struct opaq_error *error) {
    const char *const slash = strrchr(path, '/');
    const char *const name = slash == NULL ? path : slash + 1;
    char *const folder = slash == NULL   ? copy_text(".", 1)
                         : slash == path ? copy_text("/", 1)
                                         : copy_text(path, (size_t)(slash - path));
    const int handle = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    enum opaq_status status = OPAQ_OK;
    if (handle < 0) {
        status = opaq_fail(error, OPAQ_ERROR_SYSTEM, "cannot open the folder %s: %s", folder, strerror(errno));
    } else if (!folder_allows(name)) {
        status = opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s is not the name of a file", path);
    } else if (page == NULL) {
        status = output_check(handle, folder, name, error);
    } else {
        struct stat there; /* a replaced report keeps its permissions */
        const bool is_there = fstatat(handle, name, &there, AT_SYMLINK_NOFOLLOW) == 0;
        status = output_text(handle, folder, name, text_get(page), page->length,
                             is_there ? there.st_mode & 0777 : 0666, error);
    }
    if (handle >= 0) {
        close(handle);
    }
    free(folder);
    return status;
}

static enum exit_code report(const struct command_call *call, const struct weight_pairs *pairs,
                             const struct judgement *judgement) {
    const char *const path = call_value(call, "html", NULL);
    if (path != NULL) {
        struct text page = {0};
        struct opaq_error error;
        const bool is_made = verify_page(call, pairs, judgement, &page);
        const enum opaq_status status = is_made ? write_page(path, &page, &error) : OPAQ_OK;
        text_free(&page);
        if (status != OPAQ_OK) {
            complain(call, "%s", error.text);
        }
        if (!is_made || status != OPAQ_OK) {
            return EXIT_TROUBLE;
        }
    }
    if (call_has(call, "json")) {
        const enum exit_code code = json_finish(call, verify_json(pairs, judgement));
        if (code != EXIT_FINE) {
            return code;
        }
    } else {
        verify_print(pairs, judgement, call_has(call, "all"));
    }
    return judgement->failed == 0 ? EXIT_FINE : EXIT_NO;
}

static enum exit_code verify(const struct command_call *call, const struct checkpoint *quantized,
                             const struct checkpoint *original, struct limit given, int threads) {
    struct opaq_error error;
    struct opaq_pool *pool = NULL;
    const char *const path = call_value(call, "html", NULL);
    if ((path != NULL && write_page(path, NULL, &error) != OPAQ_OK) ||
        opaq_pool_create(threads, &pool, &error) != OPAQ_OK) {
        complain(call, "%s", error.text);
        return EXIT_TROUBLE;
    }
    struct weight_pairs pairs;
    weight_pairs_make(original, quantized, &pairs);
    struct progress *const progress =
        progress_begin("comparing", compare_bytes(&pairs), call_has(call, "quiet"));
    struct comparison *comparisons = NULL;
    bool is_stopped = false;
    enum opaq_status status = compare_weights(&pairs, pool, progress, &comparisons, &is_stopped, &error);
    progress_end(progress, status == OPAQ_OK);
    enum exit_code code = is_stopped ? EXIT_STOPPED : EXIT_TROUBLE;
    if (status == OPAQ_OK) {
        status = checkpoints_check(quantized, original, &error);
    }
    if (status == OPAQ_OK) {
        struct judgement judgement;
        judge(comparisons, pairs.count, given, &judgement);
        code = report(call, &pairs, &judgement);
        judgement_free(&judgement);
    } else {
        complain(call, "%s", error.text);
    }
    free(comparisons);
    weight_pairs_free(&pairs);
    opaq_pool_destroy(pool);
    return code;
}

enum exit_code command_verify(const struct command_call *call) {
    struct limit given = {(double)NAN, (double)NAN};
    long long threads = 0;
    if ((call_has(call, "min-sqnr") &&
         !call_real(call, "min-sqnr", -MOST_DECIBELS, MOST_DECIBELS, &given.sqnr)) ||
        (call_has(call, "min-cosine") && !call_real(call, "min-cosine", -1, 1, &given.cosine)) ||
        (call_has(call, "threads") && !call_integer(call, "threads", 1, MOST_THREADS, &threads))) {
        return EXIT_USAGE;
    }
    struct checkpoint quantized;
    struct checkpoint original;
    if (!checkpoint_open(call, call->arguments[0], &quantized)) {
        return EXIT_TROUBLE;
    }
    enum exit_code code = EXIT_TROUBLE;
    if (checkpoint_open(call, call->arguments[1], &original)) {
        if (quantized.weights.layout < 0 && original.weights.layout >= 0) {
            complain(call,
                     "note: %s has no quantized weights and %s has: are the two exchanged? The usage is %s",
                     call->arguments[0], call->arguments[1], "opaq verify QUANTIZED ORIGINAL");
        }
        code = verify(call, &quantized, &original, given, (int)threads);
        checkpoint_close(&original);
    }
    checkpoint_close(&quantized);
    return code;
}
