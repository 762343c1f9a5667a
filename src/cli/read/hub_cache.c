/* cli/read/hub_cache.c: see hub_cache.h. The cache is HF_HUB_CACHE, HUGGINGFACE_HUB_CACHE, HF_HOME/hub,
 * XDG_CACHE_HOME/huggingface/hub or ~/.cache/huggingface/hub, the first that the environment gives. In it
 * models--ORG--NAME/refs/REVISION names a commit and snapshots/COMMIT is a folder. */
#include "cli/read/hub_cache.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "cli/cli_memory.h"
#include "cli/texts.h"

static const char models[] = "models--";
static const char id_letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.";

static bool is_folder(const char *path) {
    struct stat what;
    return stat(path, &what) == 0 && S_ISDIR(what.st_mode);
}

/* "NAME" or "ORG/NAME", perhaps followed by "@REVISION"; a file's name is none. */
static bool is_id(const char *text) {
    const size_t first = strspn(text, id_letters);
    const bool has_owner = text[first] == '/';
    const size_t second = has_owner ? strspn(text + first + 1, id_letters) : 0;
    const size_t length = first + (has_owner ? 1 + second : 0);
    return first != 0 && text[0] != '.' && (!has_owner || (second != 0 && text[first + 1] != '.')) &&
           (text[length] == '\0' || (text[length] == '@' && text[length + 1] != '\0')) &&
           !ends_with(text, ".safetensors") && strchr(text + length, '/') == NULL;
}

static struct text cache_folder(void) {
    static const char *const places[][2] = {
        {"HF_HUB_CACHE", ""},
        {"HUGGINGFACE_HUB_CACHE", ""},
        {"HF_HOME", "/hub"},
        {"XDG_CACHE_HOME", "/huggingface/hub"},
        {"HOME", "/.cache/huggingface/hub"},
    };
    struct text folder = {0};
    for (size_t i = 0; i < sizeof places / sizeof places[0] && folder.length == 0; ++i) {
        const char *const value = getenv(places[i][0]); /* NOLINT(concurrency-mt-unsafe): before any thread */
        if (value != NULL && value[0] != '\0') {
            text_print(&folder, "%s%s", value, places[i][1]);
        }
    }
    return folder;
}

/* Adds the commit that refs/REVISION names; the revision itself if there is no such file or it is not a name. */
static void add_commit(struct text *path, const char *model, const char *revision) {
    struct text reference = {0};
    char commit[128] = "";
    text_print(&reference, "%s/refs/%s", model, revision);
    FILE *const file = fopen(text_get(&reference), "r");
    if (file != NULL) {
        commit[fread(commit, 1, sizeof commit - 1, file)] = '\0';
        (void)fclose(file);
        commit[strspn(commit, id_letters)] = '\0';
    }
    text_free(&reference);
    text_print(path, "%s", commit[0] == '\0' || commit[0] == '.' ? revision : commit);
}

/* The snapshot of a revision in the model's folder of the cache; NULL if there is none. */
static char *find_snapshot(const char *model, const char *revision) {
    struct text path = {0};
    text_print(&path, "%s/snapshots/", model);
    add_commit(&path, model, revision);
    if (!is_folder(path.bytes)) {
        text_free(&path);
        return NULL;
    }
    return path.bytes;
}

static bool is_cached_model(const char *path) {
    size_t end = strlen(path);
    while (end > 0 && path[end - 1] == '/') {
        --end;
    }
    size_t begin = end;
    while (begin > 0 && path[begin - 1] != '/') {
        --begin;
    }
    return strncmp(path + begin, models, strlen(models)) == 0;
}

char *hub_resolve(const char *path) {
    struct stat what;
    char *found = NULL;
    const bool exists = stat(path, &what) == 0;
    if (exists && S_ISDIR(what.st_mode) && is_cached_model(path)) {
        found = find_snapshot(path, "main");
    } else if (!exists && is_id(path)) {
        struct text model = cache_folder();
        const size_t length = strcspn(path, "@");
        text_print(&model, "/%s", models);
        for (size_t i = 0; i < length; ++i) {
            text_add(&model, path[i] == '/' ? "--" : &path[i], path[i] == '/' ? 2 : 1);
        }
        found = find_snapshot(text_get(&model), path[length] == '@' ? path + length + 1 : "main");
        text_free(&model);
    }
    return found == NULL ? copy_text(path, strlen(path)) : found;
}

enum opaq_status hub_refuse(const char *path, int number, struct opaq_error *error) {
    if (number != ENOENT || !is_id(path)) {
        return opaq_fail(error, OPAQ_ERROR_SYSTEM, "cannot open %s: %s", path, strerror(number));
    }
    const size_t length = strcspn(path, "@");
    const char *const revision = path[length] == '@' ? path + length + 1 : "";
    struct text cache = cache_folder();
    const enum opaq_status status = opaq_fail(error, OPAQ_ERROR_SYSTEM,
                                              "cannot open %s: there is no such file or folder, and no such "
                                              "model in the Hugging Face cache %s; if it is a "
                                              "model of the Hub, 'hf download %.*s%s%s' downloads it",
                                              path, text_get(&cache), (int)length, path,
                                              revision[0] == '\0' ? "" : " --revision ", revision);
    text_free(&cache);
    return status;
}
