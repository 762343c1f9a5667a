/* cli/commands/command_doctor.c: `opaq doctor`: what was found on this machine, what is missing, and what that means. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "cli/cli_memory.h"
#include "cli/commands/commands.h"
#include "cli/commands/machine.h"
#include "cli/console/json_output.h"
#include "cli/console/report_table.h"
#include "cli/console/terminal.h"
#include "opaq/cpu.h"
#include "opaq/execution.h"
#include "opaq/kernel.h"
#include "opaq/linear.h"
#include "opaq/quant.h"
#include "opaq/version.h"

struct format_kernels {
    const char *format;
    const char *quantize;
    const char *dequantize;
    const char *product; /* for a bfloat16 input and a tiled weight, or one in rows for formats without tiles */
};

struct finding {
    const char *subject;
    char *text;
};

struct findings {
    struct finding items[8];
    size_t count;
};

/* Adds a finding: two texts, joined. */
static void find(struct findings *findings, const char *subject, const char *text, const char *more) {
    struct text whole = {0};
    text_print(&whole, "%s%s", text, more);
    findings->items[findings->count++] = (struct finding){subject, whole.bytes};
}

/* ---- instruction sets and kernels ---- */

static const char *program_path(char *buffer, size_t capacity) {
    const ssize_t length = readlink("/proc/self/exe", buffer, capacity - 1);
    buffer[length < 0 ? 0 : length] = '\0';
    return buffer;
}

static struct format_kernels kernels_of(int format) {
    struct opaq_spec rows;
    struct opaq_spec tiles;
    (void)opaq_spec_make((enum opaq_format)format, &rows, NULL);
    const bool has_tiles = opaq_spec_derive(&rows, OPAQ_DERIVE_TILED, &tiles, NULL) == OPAQ_OK;
    return (struct format_kernels){
        opaq_format_row((enum opaq_format)format)->name, opaq_quantize_kernel(&rows),
        opaq_dequantize_kernel(&rows),
        opaq_linear_kernel(has_tiles ? &tiles : &rows, NULL, OPAQ_BF16, OPAQ_PRECISION_EXACT)};
}

/* ---- findings ---- */

static void judge(const char *cuda_reason, struct findings *findings) {
    const uint32_t features = opaq_cpu_features();
    const char *const limit = getenv("OPAQ_CPU"); /* NOLINT(concurrency-mt-unsafe): before any thread */
    struct opaq_error error = {OPAQ_OK, ""};
    if (opaq_cpu_check(&error) != OPAQ_OK) {
        find(findings, "OPAQ_CPU", "no kernel runs until it is unset or corrected: ", error.text);
    } else if (limit != NULL && limit[0] != '\0') {
        find(findings, "OPAQ_CPU", "unset it for the fastest kernels; it limits the instruction sets to ",
             limit);
    }
    if (opaq_kernel_forced()[0] != '\0') {
        find(findings, "OPAQ_KERNEL", "unset it for the fastest kernels; it forces ", opaq_kernel_forced());
    }
    if ((features & (OPAQ_CPU_AVX2 | OPAQ_CPU_NEON)) == 0) {
        find(findings, "processor",
             "neither AVX2 nor NEON: the reference kernels run; quantizing gives the same ",
             "bytes and takes several times as long");
    } else if ((features & (OPAQ_CPU_AVX512 | OPAQ_CPU_NEON)) == 0) {
        find(findings, "processor", "no AVX-512: the kernels for AVX2 run, which are slower", "");
    }
    if ((features & OPAQ_CPU_NEON) != 0) {
        find(findings, "processor", "AArch64: products with tiled weights have kernels; quantizing runs the ",
             "reference kernels, which are slower");
    }
    if (cuda_reason[0] != '\0') {
        find(findings, "CUDA",
             "tensors on a GPU are refused, those on the processor are not affected: ", cuda_reason);
    }
}

/* ---- printing ---- */

static void print_report(const char *program, const char *cuda_reason, const struct findings *findings) {
    char features[256];
    show(stdout, "opaq %s\n", opaq_version());
    show(stdout, "  command           %s\n", program);
    show(stdout, "  instruction sets  %s\n", machine_instruction_sets(features, sizeof features));
    show(stdout, "  processors        %d\n", machine_processors());
    show(stdout, "  CUDA              %s\n\n", cuda_reason[0] == '\0' ? "available" : "not available");
    struct report_table *const table =
        table_begin("format|quantize|dequantize|product with a packed weight", "llll");
    for (int i = 0; opaq_format_row((enum opaq_format)i) != NULL; ++i) {
        const struct format_kernels kernels = kernels_of(i);
        table_cell(table, "%s", kernels.format);
        table_cell(table, "%s", kernels.quantize);
        table_cell(table, "%s", kernels.dequantize);
        table_cell(table, "%s", kernels.product);
    }
    table_end(table, stdout);
    show(stdout, "\n");
    for (size_t i = 0; i < findings->count; ++i) {
        show(stdout, "%s: %s\n", findings->items[i].subject, findings->items[i].text);
    }
    if (findings->count == 0) {
        show(stdout, "Nothing is missing.\n");
    }
}

static enum exit_code print_json(const struct command_call *call, const char *program, const char *cuda_reason,
                                 const struct findings *findings) {
    yyjson_mut_doc *const document = json_begin();
    yyjson_mut_val *const root = yyjson_mut_doc_get_root(document);
    machine_add_json(document, root);
    json_add_text(document, root, "command", program);
    yyjson_mut_obj_add_bool(document, root, "cuda", cuda_reason[0] == '\0');
    yyjson_mut_val *const kernels = yyjson_mut_obj_add_arr(document, root, "kernels");
    for (int i = 0; opaq_format_row((enum opaq_format)i) != NULL; ++i) {
        const struct format_kernels of = kernels_of(i);
        yyjson_mut_val *const row = yyjson_mut_arr_add_obj(document, kernels);
        json_add_text(document, row, "format", of.format);
        json_add_text(document, row, "quantize", of.quantize);
        json_add_text(document, row, "dequantize", of.dequantize);
        json_add_text(document, row, "product", of.product);
    }
    yyjson_mut_val *const list = yyjson_mut_obj_add_arr(document, root, "findings");
    for (size_t i = 0; i < findings->count; ++i) {
        yyjson_mut_val *const finding = yyjson_mut_arr_add_obj(document, list);
        json_add_text(document, finding, "subject", findings->items[i].subject);
        json_add_text(document, finding, "text", findings->items[i].text);
    }
    return json_finish(call, document);
}

enum exit_code command_doctor(const struct command_call *call) {
    char program[4096];
    struct opaq_error cuda = {OPAQ_OK, ""};
    struct findings findings = {0};
    (void)program_path(program, sizeof program);
    if (opaq_device_check((struct opaq_device){OPAQ_DEVICE_CUDA, -1}, &cuda) == OPAQ_OK) {
        cuda.text[0] = '\0';
    }
    judge(cuda.text, &findings);
    enum exit_code code = EXIT_FINE;
    if (call_has(call, "json")) {
        code = print_json(call, program, cuda.text, &findings);
    } else {
        print_report(program, cuda.text, &findings);
    }
    for (size_t i = 0; i < findings.count; ++i) {
        free(findings.items[i].text);
    }
    return code;
}
