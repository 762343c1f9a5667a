/* cli/commands/command_table.c: all commands. The parser, the help, the manual page and the completion are generated
 * from these rows.
 *
 * Each line of a description is a paragraph; lines that begin with two spaces are printed literally. The choices of an
 * option are appended to its help. */
#include <stdio.h>
#include <string.h>

#include "cli/commands/commands.h"
#include "cli/commands/nearest.h"
#include "cli/console/terminal.h"

/* clang-format off */

/* Options that several commands have. */
#define LAST_OPTION     {NULL, NULL, NULL, NULL, false}
#define SWITCH(name, help)              {name, NULL, NULL, help, false}
#define VALUE(name, value, help)        {name, value, NULL, help, false}
#define CHOICE(name, value, choices, help) {name, value, choices, help, false}
#define REPEATED(name, value, help)     {name, value, NULL, help, true}

#define THREADS         VALUE("threads", "N", "Number of threads. The default is one for each processor.")
#define JSON            SWITCH("json", "Print JSON instead of a table.")
#define SUMMARY_JSON    SWITCH("json", "Print the summary as JSON.")
#define QUIET           SWITCH("quiet", "No progress and no summary, only errors.")
#define DRY_RUN         SWITCH("dry-run", "Read the headers and list what would be written, without writing.")
#define TENSORS(prefix) SWITCH("tensors", prefix "ist every tensor instead of groups whose names differ in numbers only.")
#define OVERWRITE       SWITCH("overwrite", "Replace the model in DST. Without this option an existing model is an error.")
#define FOLLOW_LINKS    SWITCH("follow-links", \
    "Read files that are symbolic links. Without this option they are an error, except in a Hugging Face cache, " \
    "where links within the model's own folder are read.")

#define CHECKPOINT \
    "A checkpoint is a folder of safetensors files with their index and config.json, as it was downloaded or " \
    "saved, or one .safetensors file. ORG/NAME or ORG/NAME@REVISION, if it is no path, is a model of the Hugging Face " \
    "Hub in the local cache; nothing is downloaded.\n"

#define ALL_OR_NOTHING \
    "If SRC is a folder, DST is one too and is created if it does not exist; otherwise it is a file. Each file is " \
    "written under a temporary name (.NAME.opaq-partial), flushed to disk and renamed, so it appears completely or " \
    "not at all. Disk space is reserved before the work begins. Ctrl-C stops the work and removes the partial file; " \
    "the same command continues with the missing files. config.json is written last, so a folder that has it is " \
    "complete.\n"

#define SUMMARY \
    "The summary shows the share of the parameters that is quantized and why the rest is not. With --json it is one " \
    "object: path, dry_run, format, layout, activations, files, tensors, bytes, source_bytes, matrices, parameters, quantized " \
    "(weights, parameters, share), not_quantized (reason, weights, parameters, share, first), ignored, nonfinite " \
    "(values, weights), notes.\n"

/* ---- quantize */

static const char quantize_description[] =
    "Writes the checkpoint SRC to DST with the weights of its linear layers quantized, in a layout that inference "
    "engines load. Everything else (other tensors, config.json, the tokenizer's files) is copied; "
    "config.json and the index describe the result. Weights are read and written in chunks, so the model need "
    "not fit into memory.\n"
    CHECKPOINT
    "Not quantized by default: lm_head, embeddings, router gates, norms, convolutions, vision and audio encoders; "
    "never: matrices whose rows are not whole blocks. A PATTERN of --ignore and --include is "
    "matched with the whole name of a module and is one of\n"
    "  model.layers.0.mlp.down_proj    a name\n"
    "  *.self_attn.*                   a glob: * is anything, ? one character\n"
    "  re:.*layers\\.[0-3]\\.            a regular expression as in Python, without\n"
    "                                  references, that matches from the name's\n"
    "                                  beginning\n"
    SUMMARY
    ALL_OR_NOTHING;

static const struct option_row quantize_options[] = {
    CHOICE("format", "NAME", "nvfp4|mxfp4|mxfp8|fp8|fp8row|fp8blk2",
        "Format of the quantized weights; 'opaq formats' describes them. The default is nvfp4."),
    CHOICE("layout", "NAME", "compressed-tensors|modelopt|deepseek|gpt-oss",
        "How the result is stored: names of tensors and entries of config.json. The default is "
        "compressed-tensors. 'opaq formats' lists the layouts of each format. gpt-oss stores only that model's "
        "experts, as mxfp4."),
    CHOICE("rule", "NAME", "te|ocp|rceil|compressed-tensors|modelopt",
        "How scales are computed. The default is that of the layout, which gives the same bytes as its own software."),
    CHOICE("activations", "HOW", "none|dynamic",
        "How engines treat the inputs of quantized layers, as written to config.json: none does not quantize them, "
        "dynamic quantizes them like the weights, with scales computed at run time. The default is none for formats "
        "of 4 bits, where quantizing costs accuracy, and dynamic for those of 8 bits, where it is faster; if a layout "
        "supports only one, that one."),
    REPEATED("ignore", "PATTERN",
        "Do not quantize these modules, in addition to the defaults. May be given several times."),
    REPEATED("include", "PATTERN",
        "Quantize only these modules, except ignored ones. May be given several times."),
    SWITCH("no-default-ignore",
        "Ignore only what --ignore names: output layers and router gates are quantized, too."),
    CHOICE("experts", "HOW", "split|keep",
        "How a stacked 3-D tensor of experts is stored: split, the default, writes one weight for each expert, as "
        "engines load them; keep writes one tensor of codes and one of scales for the stack."),
    SWITCH("allow-nonfinite",
        "Quantize weights that have NaNs or infinities, and print their number. Without this option the first one is "
        "an error. Each makes the weights that share its scale useless; scales of a whole tensor are those of its "
        "finite values."),
    SUMMARY_JSON, THREADS, DRY_RUN, TENSORS("With --dry-run: l"), OVERWRITE, FOLLOW_LINKS, QUIET, LAST_OPTION,
};

static const char *const quantize_examples[] = {
    "opaq quantize Llama-3.1-8B Llama-3.1-8B-NVFP4",
    "Weights as NVFP4 in the layout of compressed-tensors, which vLLM and transformers load.",
    "opaq quantize --format fp8blk2 --layout deepseek Qwen3-8B Qwen3-8B-FP8",
    "Blocks of 128x128 in FP8, stored as DeepSeek stores them.",
    "opaq quantize --format mxfp4 --ignore '*.self_attn.*' --dry-run SRC DST",
    "What would be written with attention unquantized.",
    "opaq quantize --include '*.experts.*' SRC DST",
    "Only the experts.",
    NULL,
};

/* ---- convert */

static const char convert_description[] =
    "Writes the quantized checkpoint SRC to DST in another layout without quantizing again: codes and block scales "
    "do not change, and a global scale is inverted where one layout divides and the other multiplies. "
    "Converting back gives the same bytes. With --layout plain weights are decoded to floats.\n"
    CHECKPOINT
    SUMMARY
    ALL_OR_NOTHING;

static const struct option_row convert_options[] = {
    CHOICE("layout", "NAME", "compressed-tensors|modelopt|deepseek|plain",
        "How the result is stored. plain, the default, decodes the weights to --dtype."),
    CHOICE("dtype", "NAME", "bf16|f16|f32",
        "With --layout plain: dtype of the decoded weights. The default is bf16."),
    SUMMARY_JSON, THREADS, DRY_RUN, TENSORS("With --dry-run: l"), OVERWRITE, FOLLOW_LINKS, QUIET, LAST_OPTION,
};

static const char *const convert_examples[] = {
    "opaq convert --layout modelopt model-ct model-modelopt",
    "The same codes and scales, under ModelOpt's names.",
    "opaq convert --layout plain --dtype bf16 model-NVFP4 model-bf16",
    "Decoded weights, for software without NVFP4.",
    NULL,
};

/* ---- inspect */

static const char inspect_description[] =
    "Reads the headers of a checkpoint, not its data, and lists its tensors, how they are quantized and "
    "their sizes. Bits per weight include all tensors of a weight. Notes at the end point out likely mistakes: "
    "codes without scales, a configuration that does not match, different global scales in modules that engines "
    "fuse.\n"
    CHECKPOINT
    "With --json one object: path, layout, formats, config (method, format, layout), files (name, tensors, bytes), "
    "totals (tensors, weights, parameters, bytes, bits_per_weight, quantized: the same of quantized weights), kinds, "
    "groups (pattern, first, weights, kind, shape), notes; with --tensors also tensors (name, dtype, shape, bytes, "
    "file, role, weight, layout, format).\n";

static const struct option_row inspect_options[] = {
    JSON,
    TENSORS("L"),
    FOLLOW_LINKS, LAST_OPTION,
};

static const char *const inspect_examples[] = {
    "opaq inspect model-NVFP4",
    "Formats by group of weights, and bits per weight.",
    "opaq inspect --tensors --json model.safetensors",
    "Every tensor, for other programs.",
    NULL,
};

/* ---- verify */

static const char verify_description[] =
    "Decodes every quantized weight, compares it with the original and prints the signal-to-quantization-noise "
    "ratio (SQNR, in dB, higher is better) and the cosine similarity. Weights that are not quantized must be equal.\n"
    CHECKPOINT
    "Exits with 1 if a figure is below --min-sqnr or --min-cosine, if a weight is missing or has no original, has "
    "NaNs or infinities, or if one that is not quantized differs. The defaults are 14 dB and 0.98 for "
    "4 bits, 25 dB and 0.998 for 8 bits, which normal numbers exceed by 4 dB or more.\n"
    "With --json one object: quantized, original, pass, failed, quantized_bytes, original_bytes, kinds, weights (the worst "
    "first: name, kind, verdict, equal, matrices, elements, bytes, bits_per_weight, sqnr_db, cosine, relative_error, rms, largest_error, largest_at, original_not_finite, "
    "quantized_not_finite, exact, histogram). Infinite values are null. A histogram counts |error| / rms in half "
    "octaves from 2^histogram_first_octave on; exact is the number of zero errors.\n";

static const struct option_row verify_options[] = {
    VALUE("min-sqnr", "DB", "Exit with 1 if a weight's signal-to-quantization-noise ratio is lower, in dB."),
    VALUE("min-cosine", "C", "Exit with 1 if a weight's cosine similarity is lower, from -1 to 1."),
    JSON,
    VALUE("html", "FILE", "Also write an HTML page with charts and the figures of all weights."),
    SWITCH("all", "List every weight instead of the worst."),
    THREADS, FOLLOW_LINKS,
    SWITCH("quiet", "No progress, only the report."),
    LAST_OPTION,
};

static const char *const verify_examples[] = {
    "opaq verify Llama-3.1-8B-NVFP4 Llama-3.1-8B",
    "The error of each weight, the worst first.",
    "opaq verify --min-sqnr 18 --json Q ORIGINAL > figures.json",
    "All figures for other programs; exits with 1 if a weight has less than 18 dB.",
    NULL,
};

/* ---- diff */

static const char diff_description[] =
    "Compares the tensors of two checkpoints by name and lists those that only one has and those that differ in "
    "dtype, shape or contents; also config.json and the files' metadata. The file of a tensor does not matter.\n"
    CHECKPOINT
    "Exits with 0 if there is no difference and with 1 if there is one; with --values only the values count.\n"
    "With --json one object: a, b, equal, values, compared, rounded (equal up to the rounding of float32: layouts "
    "divide by the global scale or multiply), only_in_a, only_in_b, other_type, different (name, a, b, "
    "bytes or elements, of, largest, sqnr_db), config, metadata, quantization_config_equal.\n";

static const struct option_row diff_options[] = {
    JSON,
    SWITCH("values",
        "Compare the decoded values of weights instead of bytes, so that two layouts of the same codes are equal."),
    TENSORS("L"),
    FOLLOW_LINKS, LAST_OPTION,
};

static const char *const diff_examples[] = {
    "opaq diff model-a model-b",
    "Tensors that only one has, and those that differ in dtype, shape or bytes.",
    "opaq diff --values model-ct model-modelopt",
    "Whether two layouts hold the same weights.",
    NULL,
};

/* ---- formats, bench, version */

static const char formats_description[] =
    "Lists every format with the bits per weight in a matrix of 4096x4096, scales included, the block "
    "that shares a scale, the type of its codes, the layouts that store it and the rules for its scales.\n";

static const struct option_row json_only[] = {JSON, LAST_OPTION};

static const char *const formats_examples[] = {
    "opaq formats",
    "A table.",
    "opaq formats --json",
    "The same for other programs.",
    NULL,
};

static const char bench_description[] =
    "Quantizes and dequantizes a 4096x4096 matrix of bf16 in memory, in every format, on one thread and on all. "
    "Rates count the bytes of bf16; the share is the time of copying the same number of bytes divided by the time "
    "measured.\n";

static const struct option_row bench_options[] = {
    JSON,
    VALUE("seconds", "S", "Approximate time to measure. The default is 3."),
    VALUE("threads", "N", "Threads of the second measurement. The default is one for each processor."),
    LAST_OPTION,
};

static const char *const bench_examples[] = {
    "opaq bench",
    "Rates of all formats, on one thread and on all.",
    "opaq bench --seconds 20 --json > rates.json",
    "Steadier figures, for other programs.",
    NULL,
};

static const char doctor_description[] =
    "Prints what opaq found on this machine (instruction sets, the kernels that run, the CUDA back end), what is missing "
    "and what that means. 'python -m opaq doctor' adds the Python packages.\n"
    "With --json one object: version, instruction_sets, processors, forced_kernels, command, cuda, kernels (format, "
    "quantize, dequantize, product), findings (subject, text).\n";

static const char *const doctor_examples[] = {
    "opaq doctor",
    "Why a model runs slowly, or not on a GPU.",
    "opaq doctor --json > machine.json",
    "The same, to attach to a bug report.",
    NULL,
};

static const char version_description[] =
    "Prints the version, the instruction sets that kernels can use, and the number of processors.\n";

static const char *const version_examples[] = {
    "opaq version",
    "The version, and the instruction sets of this processor.",
    NULL,
};

/* ---- reproduce */

static const char reproduce_description[] =
    "Quantizes and multiplies fixed numbers and prints a hash of the bytes for each quantizer and plan, and one for all "
    "of them. Two machines with the same hash compute the same bits.\n"
    "The first part is the same on every processor and with any number of threads: quantizing, dequantizing, products "
    "with weights in rows, their gradients, and MLPs. The second part is products with weights in tiles. Their kernels "
    "add in an order that depends on the instruction set, so these hashes may differ between processors, but not between runs.\n"
    "With --json one object: version, cpu, same_everywhere and may_differ (hash, results: operation, what, hash).\n";

static const struct option_row reproduce_options[] = {
    JSON,
    VALUE("expect", "HASH", "Exit with 1 if the first part, which is the same on every processor, has another hash."),
    THREADS, LAST_OPTION,
};

static const char *const reproduce_examples[] = {
    "opaq reproduce --json > here.json",
    "Hashes of this machine.",
    "opaq reproduce --expect 0123456789abcdef",
    "Exits with 1 if this machine computes other bits than the machine that printed the hash.",
    NULL,
};

/* ---- help, completion */

static const char help_description[] = "Describes a command, or lists them all.\n";

static const struct option_row help_options[] = {
    SWITCH("man", "Print the manual page, for man -l."),
    LAST_OPTION,
};

static const char *const help_examples[] = {
    "opaq help quantize",
    "The same as 'opaq quantize --help'.",
    "opaq help --man | man -l -",
    "The manual page.",
    NULL,
};

static const char completion_description[] =
    "Prints a script that completes commands, options and values of opaq in a shell: bash, zsh or fish.\n";

static const struct option_row no_options[] = {LAST_OPTION};

static const char *const completion_examples[] = {
    "source <(opaq completion bash)",
    "Completes commands, options and their values in this bash.",
    "source <(opaq completion zsh)",
    "The same in zsh, after compinit.",
    "opaq completion fish | source",
    "The same in fish.",
    NULL,
};

/* The options, description, examples and function of a command carry its name. */
#define ROW(name, summary, arguments, least, most, options) \
    {#name, summary, arguments, least, most, options, name##_description, name##_examples, command_##name}
#define LAST_ROW {NULL, NULL, NULL, 0, 0, NULL, NULL, NULL, NULL}

const struct command_row command_table[] = {
    ROW(quantize, "quantize the weights of a checkpoint",           "SRC DST", 2, 2, quantize_options),
    ROW(convert,  "store a quantized checkpoint in another layout", "SRC DST", 2, 2, convert_options),
    ROW(inspect,  "list the contents of a checkpoint",                    "PATH",    1, 1, inspect_options),
    ROW(verify,   "measure the error of a quantized checkpoint",   "QUANTIZED ORIGINAL", 2, 2, verify_options),
    ROW(diff,     "compare two checkpoints",                 "A B",     2, 2, diff_options),
    ROW(formats,  "describe the formats",                           "",        0, 0, json_only),
    ROW(bench,    "measure the speed of quantizing",        "",        0, 0, bench_options),
    ROW(reproduce, "print hashes of results, to compare machines", "",  0, 0, reproduce_options),
    ROW(doctor,   "report what was found and what is missing", "",  0, 0, json_only),
    ROW(version,  "print the version and the instruction sets", "",  0, 0, json_only),
    LAST_ROW,
};

const struct command_row hidden_command_table[] = {
    ROW(help,       "describe a command",              "[COMMAND]", 0, 1, help_options),
    ROW(completion, "print the completion of a shell", "SHELL",     1, 1, no_options),
    LAST_ROW,
};
/* clang-format on */

static const struct command_row *find_in(const struct command_row *table, const char *name) {
    for (; table->name != NULL; ++table) {
        if (strcmp(table->name, name) == 0) {
            return table;
        }
    }
    return NULL;
}

const struct command_row *command_find(const char *name) {
    const struct command_row *const row = find_in(command_table, name);
    return row != NULL ? row : find_in(hidden_command_table, name);
}

enum exit_code command_unknown(const char *name) {
    if (name[0] == '-') {
        show(stderr, "opaq: expected a command before %s\n'opaq --help' lists them.\n", name);
        return EXIT_USAGE;
    }
    struct nearest nearest = nearest_begin(name);
    for (const struct command_row *row = command_table; row->name != NULL; ++row) {
        nearest_try(&nearest, row->name, strlen(row->name));
    }
    nearest_try(&nearest, "help", 4);
    show(stderr, "opaq: there is no command \"%s\"%s%s%s\n'opaq --help' lists them.\n", name,
         nearest.best == NULL ? "" : "; did you mean ", nearest.best == NULL ? "" : nearest.best,
         nearest.best == NULL ? "" : "?");
    return EXIT_USAGE;
}
