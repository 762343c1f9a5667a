/* cli/commands/commands.h: the functions behind the command table, one file each, and the hidden commands. */
#ifndef OPAQ_CLI_COMMANDS_COMMANDS_H
#define OPAQ_CLI_COMMANDS_COMMANDS_H

#include "cli/command.h"

enum exit_code run_quantize(const struct command_call *call);
enum exit_code run_convert(const struct command_call *call);
enum exit_code run_inspect(const struct command_call *call);
enum exit_code run_verify(const struct command_call *call);
enum exit_code run_diff(const struct command_call *call);
enum exit_code run_formats(const struct command_call *call);
enum exit_code run_bench(const struct command_call *call);
enum exit_code run_version(const struct command_call *call);
enum exit_code run_help(const struct command_call *call);
enum exit_code run_completion(const struct command_call *call);

/* Commands that the overview does not list. Ends with a name of NULL. */
extern const struct command_row hidden_command_table[];

/* Searches both tables; NULL if there is no command of that name. */
const struct command_row *command_find(const char *name);

/* "opaq: there is no command x; did you mean y?", to stderr. */
enum exit_code command_unknown(const char *name);

#endif
