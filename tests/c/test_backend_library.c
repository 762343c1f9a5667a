/* test_backend_library.c: the CUDA back end where it is unavailable: each reason gives one message, and the CPU
 * continues to work. Each case runs in a separate process, because the result of loading is cached. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../cuda/emulation.h"
#include "backend/backend_library.h"
#include "check.h"
#include "opaq/opaq.h"
#include "support_quant.h"
#include "support_spec.h"

/* The error of quantizing a tensor on a GPU with this file as the back end, "" if there is none. */
static void error_with(const char *file, char text[OPAQ_ERROR_TEXT_BYTES]) {
    int ends[2];
    int status = -1;
    memset(text, 0, OPAQ_ERROR_TEXT_BYTES);
    if (!CHECK(pipe(ends) == 0)) {
        return;
    }
    const pid_t child = fork();
    if (child == 0) {
        struct opaq_error error = {.text = ""};
        const struct opaq_spec spec = spec_of("nvfp4");
        struct tensor x = tensor_make(16, 32, OPAQ_F32, NULL);
        struct tensor q = quantized_like(&x, &spec);
        if (file != NULL) {
            (void)setenv("OPAQ_CUDA_LIBRARY", file, 1);
        } else {
            (void)unsetenv("OPAQ_CUDA_LIBRARY");
        }
        x.view.proto.device.type = OPAQ_DEVICE_CUDA;
        q.view.proto.device.type = OPAQ_DEVICE_CUDA;
        const enum opaq_status first = opaq_quantize(&x.view, NULL, NULL, &q.view, &error);
        const enum opaq_status again = opaq_quantize(&x.view, NULL, NULL, &q.view, &error);
        x.view.proto.device.type = OPAQ_DEVICE_CPU;
        q.view.proto.device.type = OPAQ_DEVICE_CPU;
        const enum opaq_status cpu = opaq_quantize(&x.view, NULL, NULL, &q.view, NULL);
        const ssize_t written = write(ends[1], error.text, strlen(error.text));
        _exit(written < 0 || first != again || cpu != OPAQ_OK);
    }
    (void)close(ends[1]);
    CHECK(read(ends[0], text, OPAQ_ERROR_TEXT_BYTES - 1) >= 0);
    (void)close(ends[0]);
    CHECK(waitpid(child, &status, 0) == child);
    CHECK_EQ_INT(status, 0);
}

static void missing_file(void) {
    char text[OPAQ_ERROR_TEXT_BYTES];
    error_with("/nowhere/libopaq_cuda.so", text);
    CHECK(strstr(text, "the tensors are on cuda:0: this installation has no CUDA back end (/nowhere") != NULL);
    error_with(NULL, text);
    CHECK(strstr(text, "this installation has no CUDA back end") != NULL);
    CHECK(strstr(text, "libopaq_cuda.so") != NULL);
}

static void file_of_another_kind(void) {
    char text[OPAQ_ERROR_TEXT_BYTES];
    error_with("libm.so.6", text);
    CHECK_EQ_STR(text, "quantize: the tensors are on cuda:0: libm.so.6 is not opaq's CUDA back end");
}

/* The real file, if this build has it: on a machine without a driver the message says so. */
static void a_machine_without_a_driver(void) {
    const char *file = getenv("OPAQ_TEST_REAL_CUDA_LIBRARY");
    void *const driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    char text[OPAQ_ERROR_TEXT_BYTES];
    if (file == NULL || driver != NULL) {
        printf("  skipped: %s\n", file == NULL ? "OPAQ_CUDA is OFF" : "there is a driver");
        return;
    }
    error_with(file, text);
    CHECK(strstr(text, "opaq's CUDA back end found no NVIDIA driver on this machine") != NULL);
}

/* A function of the emulated back end, NULL with a note if that was not built. */
static void *emulated_symbol(const char *name) {
    const char *file = getenv("OPAQ_TEST_CUDA_LIBRARY");
    void *const library = file == NULL ? NULL : dlopen(file, RTLD_NOW | RTLD_LOCAL);
    void *const symbol = library == NULL ? NULL : dlsym(library, name);
    if (symbol == NULL) {
        printf("  skipped: OPAQ_TEST_CUDA_LIBRARY names no emulated back end\n");
    }
    return symbol;
}

/* Another version, and a table of another size. */
static void another_build(void) {
    void *const symbol = emulated_symbol("opaq_cuda_open");
    const struct backend *table = NULL;
    struct opaq_error error;
    backend_open_function *open;
    if (symbol == NULL) {
        return;
    }
    memcpy(&open, &symbol, sizeof open);
    CHECK_EQ_INT(open("0.0.0", sizeof *table, &table, &error), OPAQ_ERROR_UNSUPPORTED);
    CHECK(strstr(error.text, "install both from one build") != NULL);
    CHECK_EQ_INT(open(opaq_version(), sizeof *table - 8, &table, &error), OPAQ_ERROR_UNSUPPORTED);
    CHECK(table == NULL);
    CHECK_EQ_INT(open(opaq_version(), sizeof *table, &table, &error), OPAQ_OK);
    CHECK_EQ_STR(table->name, "cuda");
}

/* ---- machines ---- */

struct machine {
    int driver; /* of emulation.h */
    int capabilities[3], count;
    const char *text; /* the error of the first use */
};

static emulation_machine_function *machine_function(void) {
    emulation_machine_function *set_machine = NULL;
    void *const symbol = emulated_symbol("emulation_set_machine");
    memcpy(&set_machine, &symbol, sizeof symbol);
    return set_machine;
}

/* Each in a process of its own that inherits the emulated machine. */
static void machines_that_cannot_be_used(void) {
    static const struct machine machines[] = {
        {0,
         {90},
         1,
         "opaq's CUDA back end found no NVIDIA driver on this machine: install one, or use tensors on "
         "the cpu"},
        {12080,
         {90},
         1,
         "the NVIDIA driver supports CUDA 12.8, opaq's CUDA back end needs 13.0: update the driver, "
         "or use tensors on the cpu"},
        {13000, {0}, 0, "opaq's CUDA back end found no GPU: no CUDA-capable device is detected"},
        {13000, {75}, 1, "opaq's CUDA back end needs a GPU of compute capability 8.0 or later: GPU 0 has 7.5"},
        {13000,
         {75, 61, 70},
         3,
         "opaq's CUDA back end needs a GPU of compute capability 8.0 or later: GPU 0 has "
         "7.5, GPU 1 has 6.1, GPU 2 has 7.0"},
    };
    emulation_machine_function *const set_machine = machine_function();
    const int usual[] = {90, 90};
    for (size_t i = 0; set_machine != NULL && i < sizeof machines / sizeof machines[0]; ++i) {
        char text[OPAQ_ERROR_TEXT_BYTES];
        char expected[OPAQ_ERROR_TEXT_BYTES];
        (void)snprintf(expected, sizeof expected, "quantize: the tensors are on cuda:0: %s", machines[i].text);
        set_machine(machines[i].driver, machines[i].capabilities, machines[i].count);
        error_with(getenv("OPAQ_TEST_CUDA_LIBRARY"), text);
        CHECK_EQ_STR(text, expected);
        set_machine(13000, usual, 2);
    }
}

/* An error for each index that is not that of a GPU that can run the kernels. */
static void devices_by_index(void) {
    static const struct {
        int index;
        const char *text;
    } checks[] = {{0, "cuda:0 has compute capability 7.5, opaq's CUDA back end needs 8.0 or later"},
                  {1, ""},
                  {2, "there is no cuda:2: the machine has 2 GPUs, expected 0 to 1"},
                  {7, "there is no cuda:7: the machine has 2 GPUs, expected 0 to 1"},
                  {-2, "there is no cuda:-2: the machine has 2 GPUs, expected 0 to 1"},
                  {-1, ""}};
    emulation_machine_function *const set_machine = machine_function();
    void *const symbol = emulated_symbol("opaq_cuda_open");
    const int capabilities[] = {75, 90};
    const int usual[] = {90, 90};
    const struct backend *table = NULL;
    backend_open_function *open;
    if (set_machine == NULL || symbol == NULL) {
        return;
    }
    memcpy(&open, &symbol, sizeof open);
    set_machine(13000, capabilities, 2);
    CHECK_EQ_INT(open(opaq_version(), sizeof *table, &table, NULL), OPAQ_OK);
    backend_install(OPAQ_DEVICE_CUDA, table);
    for (size_t i = 0; i < sizeof checks / sizeof checks[0]; ++i) {
        const struct opaq_device device = {OPAQ_DEVICE_CUDA, checks[i].index};
        struct opaq_error error = {OPAQ_OK, ""};
        CHECK_EQ_INT(opaq_device_check(device, &error),
                     checks[i].text[0] == '\0' ? OPAQ_OK : OPAQ_ERROR_UNSUPPORTED);
        CHECK_EQ_STR(error.text, checks[i].text);
    }
    backend_install(OPAQ_DEVICE_CUDA, NULL);
    set_machine(13000, usual, 2);
    CHECK_EQ_INT(opaq_device_check((struct opaq_device){OPAQ_DEVICE_CPU, 0}, NULL), OPAQ_OK);
}

static const struct test_case tests[] = {
    TEST(missing_file),  TEST(file_of_another_kind),         TEST(a_machine_without_a_driver),
    TEST(another_build), TEST(machines_that_cannot_be_used), TEST(devices_by_index)};
TEST_MAIN(tests)
