/* backend/backend_library.c: loads the CUDA back end. */
#define _GNU_SOURCE /* dladdr */
#include "backend/backend_library.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PATH_BYTES = 4096 };

static const char file_name[] = "libopaq_cuda.so";

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const struct backend *opened;
static struct opaq_error refusal;

/* The path of the back end's shared object: the folder of this library. False if that is unknown. */
static bool find_path(char path[PATH_BYTES]) {
    const char *given = getenv("OPAQ_CUDA_LIBRARY");
    Dl_info info;
    void *address;
    bool (*const here)(char *) = find_path;
    if (given != NULL && given[0] != '\0') {
        return snprintf(path, PATH_BYTES, "%s", given) < PATH_BYTES;
    }
    memcpy(&address, &here, sizeof address);
    if (dladdr(address, &info) == 0 || info.dli_fname == NULL) {
        return false;
    }
    const char *slash = strrchr(info.dli_fname, '/');
    const int folder = slash == NULL ? 0 : (int)(slash - info.dli_fname) + 1;
    return snprintf(path, PATH_BYTES, "%.*s%s", folder, info.dli_fname, file_name) < PATH_BYTES;
}

static void open_once(void) {
    char path[PATH_BYTES];
    backend_open_function *function;
    if (!find_path(path)) {
        (void)opaq_fail(&refusal, OPAQ_ERROR_UNSUPPORTED, "the folder of opaq's library is not known");
        return;
    }
    void *const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        (void)opaq_fail(&refusal, OPAQ_ERROR_UNSUPPORTED, "this installation has no CUDA back end (%s)",
                        dlerror());
        return;
    }
    void *const symbol = dlsym(library, "opaq_cuda_open");
    if (symbol == NULL) {
        (void)opaq_fail(&refusal, OPAQ_ERROR_UNSUPPORTED, "%s is not opaq's CUDA back end", path);
        (void)dlclose(library);
        return;
    }
    memcpy(&function, &symbol, sizeof function);
    if (function(opaq_version(), sizeof(struct backend), &opened, &refusal) != OPAQ_OK) {
        opened =
            NULL; /* stays loaded: CUDA's runtime in it may have threads and functions for the process's exit */
    }
}

enum opaq_status backend_library_open(const struct backend **backend, struct opaq_error *error) {
    (void)pthread_once(&once, open_once);
    *backend = opened;
    return opened != NULL ? OPAQ_OK : opaq_fail(error, refusal.status, "%s", refusal.text);
}
