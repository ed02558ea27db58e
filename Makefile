# Chanter's only build file. Everything it makes is under build/.
#
#   make            build/bin/chanter and the role programs beside it
#   make run        install what is missing, build, train on the bundled sample as processes
#   make test       install what is missing, build, run every test
#   make check      the tests alone          make deps    the packages alone
#   make bench-peer Chanter beside PyTorch; ARGS="--quick" (docs/benchmarks.md)
#   make matrix     I1 over every combination of trainers, servers, lookahead, ...
#   make bugs       plant known bugs, one by one: the tests must find them
#   make SAN=address|undefined|thread check  the same under a sanitizer, in build/SAN/
#   make sanitize                            the tests where sanitizers have most to see
#   make BUG=name                            a build with a planted bug, in build/bug-name/
#   CI=1: warnings are errors.  V=1: show commands.

.DEFAULT_GOAL := all
.DELETE_ON_ERROR:
Q := $(if $(V),,@)

# --- what the system has to provide: the one list -------------------------------------------
PACKAGES := gcc make pkg-config libgrpc-dev libprotobuf-c-dev protobuf-c-compiler \
            libopenmpi-dev openmpi-bin libcmocka-dev libdnnl-dev libcyaml-dev libjansson-dev \
            libxxhash-dev zlib1g-dev python3 python3-numpy
# For `make bench-peer` alone: a virtual environment, and what torch.compile calls.
PEER_PACKAGES := python3-venv python3-dev g++
PEER_WHEELS   := torch numpy
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)

.PHONY: all deps run test check sanitize matrix bugs bench-peer clean FORCE
deps:
	$(Q)missing=$$(for p in $(PACKAGES); do \
	    dpkg-query -W -f '$${Status}' $$p 2>/dev/null | grep -q '^install ok installed' || echo $$p; done); \
	if [ -n "$$missing" ]; then \
	    echo "installing:" $$missing; \
	    $(SUDO) apt-get update -qq && \
	    $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; \
	fi

# --- flavours -------------------------------------------------------------------------------
# O: objects. B: what is linked from them. With BUG only the files that hold the planted bug are
# compiled again; all others are the usual build's.
O       := build/$(or $(SAN),release)
B       := $(if $(BUG),build/bug-$(BUG),$O)
BIN     := $(if $(filter build/release,$B),build/bin,$B/bin)
GEN     := build/gen

CC      := gcc
WARN    := -Wall -Wextra -Wshadow -Wvla -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith \
           -Wno-unused-parameter $(if $(CI),-Werror)
# -ffp-contract=off: a product and a sum stay two roundings, in every build (I1).
CFLAGS  := -std=c11 -O2 -g -fno-omit-frame-pointer -ffp-contract=off -D_POSIX_C_SOURCE=200809L \
           -fstack-protector-strong $(WARN) \
           $(if $(SAN),-fsanitize=$(SAN) -fno-sanitize-recover=all,-D_FORTIFY_SOURCE=2)
# -fno-math-errno: sqrtf becomes one instruction; no result changes.
CFLAGS_compute := -O3 -fno-math-errno -march=$(or $(MARCH),native)
INC     := -I. -I$(GEN)
MPI_INC  = $(shell pkg-config --cflags ompi-c)
MPI_LIB  = $(shell pkg-config --libs ompi-c)
LDLIBS  := -lgrpc -lgpr -lprotobuf-c -lcyaml -lyaml -ljansson -lxxhash -lz -ldnnl -lgomp -lpthread -lm

# --- sources --------------------------------------------------------------------------------
FOLDERS := base config data proto compute oracle embserver trainer launch
SRC     := $(filter-out %/main.c,$(foreach d,$(FOLDERS),$(wildcard $d/*.c)))
PROTO   := $(wildcard proto/*.proto)
GENC    := $(patsubst proto/%.proto,$(GEN)/proto/%.pb-c.c,$(PROTO))
BUGGY   := $(if $(BUG),$(shell grep -lw BUG_$(BUG) $(SRC)))
$(if $(BUG),$(if $(BUGGY),,$(error there is no planted bug BUG_$(BUG))))
OBJ     := $(patsubst %.c,$O/%.o,$(filter-out $(BUGGY),$(SRC))) $(BUGGY:%.c=$B/%.o) \
           $(patsubst $(GEN)/%.c,$O/gen/%.o,$(GENC))
PROGRAMS := $(BIN)/chanter $(BIN)/chanter-oracle $(BIN)/chanter-embserver $(BIN)/chanter-trainer
TESTS   := $(patsubst %.c,$B/%,$(wildcard tests/unit/test_*.c))
SUPPORT := $(patsubst %.c,$O/%.o,$(wildcard tests/support/*.c))

all: $(PROGRAMS)

$(GEN)/proto/%.pb-c.c: proto/%.proto
	@mkdir -p $(GEN)
	$(Q)protoc-c --c_out=$(GEN) $<
GENH := $(GENC:.c=.h)
$(GENH): %.h: %.c ;

# Rebuild when the flags change.
$O/.flags: FORCE
	@mkdir -p $O; echo '$(CC) $(CFLAGS) $(CFLAGS_compute)' | cmp -s - $@ || \
	    echo '$(CC) $(CFLAGS) $(CFLAGS_compute)' > $@

COMPILE = @mkdir -p $(@D); $(if $(V),,echo "  CC $<";) \
    $(CC) $(CFLAGS) $(CFLAGS_$(firstword $(subst /, ,$<))) $(INC) $(EXTRA) -MMD -MP -c $< -o $@
$O/gen/%.o: $(GEN)/%.c $O/.flags | $(GENH) ; $(COMPILE)
$O/trainer/comm_mpi.o: EXTRA = $(MPI_INC)
$O/trainer/main.o: EXTRA = $(MPI_INC)
$O/%.o: %.c $O/.flags | $(GENH) ; $(COMPILE)
ifdef BUG
$B/%.o: EXTRA = -DBUG_$(BUG) -Wno-error
$B/%.o: %.c $O/.flags | $(GENH) ; $(COMPILE)
endif

$B/lib.a: $(OBJ)
	$(Q)rm -f $@; ar qcs $@ $^

LINK = @mkdir -p $(@D); $(if $(V),,echo "  LD $@";) $(CC) $(CFLAGS) $^ $(EXTRA_LIBS) $(LDLIBS) -o $@
$(BIN)/chanter: $O/launch/main.o $B/lib.a ; $(LINK)
$(BIN)/chanter-oracle: $O/oracle/main.o $B/lib.a ; $(LINK)
$(BIN)/chanter-embserver: $O/embserver/main.o $B/lib.a ; $(LINK)
$(BIN)/chanter-trainer: EXTRA_LIBS = $(MPI_LIB)
$(BIN)/chanter-trainer: $O/trainer/main.o $B/lib.a ; $(LINK)
$(TESTS): EXTRA_LIBS = -lcmocka
$(TESTS): $B/%: $O/%.o $(SUPPORT) $B/lib.a ; $(LINK)
.SECONDARY:

# --- tests ----------------------------------------------------------------------------------
check: $(TESTS) $(PROGRAMS)
	$(Q)tests/run $B $(BIN)

# The whole matrix (I1); tests/run has the quick one.
matrix: all
	$(Q)tests/matrix --bin $(BIN)
# Every planted bug has to be found by the test that is there for it.
bugs:
	$(Q)tests/bugs

# Parsers and arrays under address and undefined, hand-overs between threads under thread.
SANITIZE := address:codec address:codec_plan address:criteo_tsv address:prepared \
            address:safetensors address:config_bad address:store address:planner_limits \
            undefined:codec_plan undefined:cpu_sums undefined:group undefined:planner \
            thread:ring thread:lanes thread:comm thread:exchange thread:embserver thread:oracle
sanitize:
	$(Q)set -e; for pair in $(SANITIZE); do \
	    san=$${pair%%:*}; t=build/$$san/tests/unit/test_$${pair#*:}; \
	    $(MAKE) --no-print-directory SAN=$$san $$t; echo "== $$t"; $$t; \
	done

# deps is a separate make, so that pkg-config and protoc-c are there when this file is read again.
test:
	$(Q)$(MAKE) --no-print-directory deps
	$(Q)$(MAKE) --no-print-directory check
run:
	$(Q)$(MAKE) --no-print-directory deps
	$(Q)$(MAKE) --no-print-directory all
	$(Q)$(BIN)/chanter launch examples/sample.yaml --overwrite

# --- beside PyTorch -------------------------------------------------------------------------
PEER_VENV := build/peer-venv
# Standard output is left to the results.
bench-peer:
	$(Q)$(MAKE) --no-print-directory deps PACKAGES="$(PACKAGES) $(PEER_PACKAGES)" >&2
	$(Q)$(MAKE) --no-print-directory all $(PEER_VENV)/ready >&2
	$(Q)bench/peer.py --bin $(BIN) --python $(PEER_VENV)/bin/python $(ARGS)
$(PEER_VENV)/ready:
	$(Q)rm -rf $(@D); mkdir -p build; python3 -m venv $(@D)
	$(Q)$(@D)/bin/pip install --quiet $(PEER_WHEELS)
	$(Q)touch $@

clean:
	$(Q)rm -rf build

-include $(patsubst %.o,%.d,$(OBJ)) $(wildcard $O/*/*.d $O/tests/*/*.d)
