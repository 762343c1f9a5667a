/* cuda/gemm/cublaslt.cu: finds and opens cuBLASLt. Nothing is written, and a missing library is no error. */
#include "cuda/gemm/cublaslt.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(OPAQ_CUDA_EMULATION) /* only the file that OPAQ_CUBLASLT_LIBRARY names, of a test */

static void *open_installed(void) { return NULL; }

#else

static const char *const names[] = {"libcublasLt.so.13", "libcublasLt.so.12"};
enum { NAMES = sizeof names / sizeof names[0] };

/* ---- beside other libraries ---- */

enum { FOLDER_BYTES = 1024 };

/* Stores the folder of the first loaded file whose name begins like one of these. */
static int find_folder(struct dl_phdr_info *info, size_t bytes, void *folder) {
    static const char *const neighbours[] = {"libtorch_cuda", "libcudart.so"};
    const char *const path = info->dlpi_name;
    const char *const slash = path == NULL ? NULL : strrchr(path, '/');
    (void)bytes;
    for (int i = 0; slash != NULL && i < 2; ++i) {
        if (strncmp(slash + 1, neighbours[i], strlen(neighbours[i])) == 0 && slash - path < FOLDER_BYTES) {
            (void)snprintf((char *)folder, FOLDER_BYTES, "%.*s", (int)(slash - path), path);
            return 1;
        }
    }
    return 0;
}

static void *open_beside(void) {
    static const char *const ways[] = {".", "../../nvidia/cu13/lib", "../../nvidia/cublas/lib",
                                       "../../cublas/lib"};
    char folder[FOLDER_BYTES];
    char path[FOLDER_BYTES + 64];
    void *library = NULL;
    if (dl_iterate_phdr(find_folder, folder) == 0) {
        return NULL;
    }
    for (int i = 0; i < 4 * NAMES && library == NULL; ++i) {
        (void)snprintf(path, sizeof path, "%s/%s/%s", folder, ways[i / NAMES], names[i % NAMES]);
        library = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
    }
    return library;
}

static void *open_installed(void) {
    static const int modes[] = {RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD, RTLD_LAZY | RTLD_LOCAL};
    void *library = NULL;
    for (int i = 0; i < 2 * NAMES && library == NULL; ++i) {
        library = dlopen(names[i % NAMES], modes[i / NAMES]);
    }
    return library == NULL ? open_beside() : library;
}

#endif

static void *open_library(void) {
    const char *const given = getenv("OPAQ_CUBLASLT_LIBRARY");
    return given != NULL && given[0] != '\0' ? dlopen(given, RTLD_LAZY | RTLD_LOCAL) : open_installed();
}

/* ---- functions ---- */

static struct cublaslt functions;
static bool is_found;

/* All of them are in every version from 12.0 on. */
static void find(void) {
    static const struct {
        const char *name;
        void *function;
    } all[] = {{"cublasLtCreate", &functions.create},
               {"cublasLtMatmulDescInit_internal", &functions.descriptor_init},
               {"cublasLtMatmulDescSetAttribute", &functions.descriptor_set},
               {"cublasLtMatrixLayoutInit_internal", &functions.layout_init},
               {"cublasLtMatmulPreferenceInit_internal", &functions.preference_init},
               {"cublasLtMatmulPreferenceSetAttribute", &functions.preference_set},
               {"cublasLtMatmulAlgoGetHeuristic", &functions.choose},
               {"cublasLtMatmul", &functions.matmul}};
    void *const library = open_library();
    is_found = library != NULL;
    for (size_t i = 0; is_found && i < sizeof all / sizeof all[0]; ++i) {
        void *const symbol = dlsym(library, all[i].name);
        memcpy(all[i].function, &symbol, sizeof symbol);
        is_found = symbol != NULL;
    }
}

const struct cublaslt *cublaslt_find(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, find);
    return is_found ? &functions : NULL;
}
