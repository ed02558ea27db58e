# Chanter's only build file. Everything it makes is under build/.
#
#   make            build/bin/chanter and the role programs beside it
#   make run        install what is missing, build, train on the bundled sample as processes
#   make test       install what is missing, build, run every test
#   make check      the tests alone          make deps    the packages alone
#   make SAN=address|undefined|thread check  the same under a sanitizer, in build/SAN/
#   make BUG=name                            a build with a planted bug, in build/bug-name/
#   CI=1: warnings are errors.  V=1: show commands.

.DEFAULT_GOAL := all
.DELETE_ON_ERROR:
Q := $(if $(V),,@)

# --- what the system has to provide: the one list -------------------------------------------
PACKAGES := gcc make pkg-config libgrpc-dev libprotobuf-c-dev protobuf-c-compiler \
            libopenmpi-dev openmpi-bin libcmocka-dev libdnnl-dev libcyaml-dev libjansson-dev \
            libxxhash-dev zlib1g-dev python3 python3-numpy
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)

.PHONY: all deps run test check layers clean FORCE
deps:
	$(Q)missing=$$(for p in $(PACKAGES); do \
	    dpkg-query -W -f '$${Status}' $$p 2>/dev/null | grep -q '^install ok installed' || echo $$p; done); \
	if [ -n "$$missing" ]; then \
	    echo "installing:" $$missing; \
	    $(SUDO) apt-get update -qq && \
	    $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; \
	fi

# --- flavours -------------------------------------------------------------------------------
FLAVOUR := $(or $(SAN),$(if $(BUG),bug-$(BUG),release))
B       := build/$(FLAVOUR)
BIN     := $(if $(filter release,$(FLAVOUR)),build/bin,$B/bin)
GEN     := build/gen

CC      := gcc
WARN    := -Wall -Wextra -Wshadow -Wvla -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith \
           -Wno-unused-parameter $(if $(CI),-Werror)
# -ffp-contract=off: a product and a sum stay two roundings, in every build (I1).
CFLAGS  := -std=c11 -O2 -g -fno-omit-frame-pointer -ffp-contract=off -D_POSIX_C_SOURCE=200809L \
           -fstack-protector-strong $(WARN) \
           $(if $(SAN),-fsanitize=$(SAN) -fno-sanitize-recover=all,-D_FORTIFY_SOURCE=2) \
           $(if $(BUG),-DBUG_$(BUG))
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
OBJ     := $(patsubst %.c,$B/%.o,$(SRC)) $(patsubst $(GEN)/%.c,$B/gen/%.o,$(GENC))
PROGRAMS := $(BIN)/chanter $(BIN)/chanter-oracle $(BIN)/chanter-embserver $(BIN)/chanter-trainer
TESTS   := $(patsubst %.c,$B/%,$(wildcard tests/unit/test_*.c))
SUPPORT := $(patsubst %.c,$B/%.o,$(wildcard tests/support/*.c))

all: $(PROGRAMS)

$(GEN)/proto/%.pb-c.c: proto/%.proto
	@mkdir -p $(GEN)
	$(Q)protoc-c --c_out=$(GEN) $<
GENH := $(GENC:.c=.h)
$(GENH): %.h: %.c ;

# Rebuild when the flags change.
$B/.flags: FORCE
	@mkdir -p $B; echo '$(CC) $(CFLAGS) $(CFLAGS_compute)' | cmp -s - $@ || \
	    echo '$(CC) $(CFLAGS) $(CFLAGS_compute)' > $@

COMPILE = @mkdir -p $(@D); $(if $(V),,echo "  CC $<";) \
    $(CC) $(CFLAGS) $(CFLAGS_$(firstword $(subst /, ,$<))) $(INC) $(EXTRA) -MMD -MP -c $< -o $@
$B/gen/%.o: $(GEN)/%.c $B/.flags | $(GENH) ; $(COMPILE)
$B/trainer/comm_mpi.o: EXTRA = $(MPI_INC)
$B/trainer/main.o: EXTRA = $(MPI_INC)
$B/%.o: %.c $B/.flags | $(GENH) ; $(COMPILE)

$B/lib.a: $(OBJ)
	$(Q)rm -f $@; ar qcs $@ $^

LINK = @mkdir -p $(@D); $(if $(V),,echo "  LD $@";) $(CC) $(CFLAGS) $^ $(EXTRA_LIBS) $(LDLIBS) -o $@
$(BIN)/chanter: $B/launch/main.o $B/lib.a ; $(LINK)
$(BIN)/chanter-oracle: $B/oracle/main.o $B/lib.a ; $(LINK)
$(BIN)/chanter-embserver: $B/embserver/main.o $B/lib.a ; $(LINK)
$(BIN)/chanter-trainer: EXTRA_LIBS = $(MPI_LIB)
$(BIN)/chanter-trainer: $B/trainer/main.o $B/lib.a ; $(LINK)
$(TESTS): EXTRA_LIBS = -lcmocka
$(TESTS): %: %.o $(SUPPORT) $B/lib.a ; $(LINK)
.SECONDARY:

# --- tests ----------------------------------------------------------------------------------
check: $(TESTS) $(PROGRAMS)
	$(Q)tests/run $B $(BIN)

# deps is a separate make, so that pkg-config and protoc-c are there when this file is read again.
test:
	$(Q)$(MAKE) --no-print-directory deps
	$(Q)$(MAKE) --no-print-directory check
run:
	$(Q)$(MAKE) --no-print-directory deps
	$(Q)$(MAKE) --no-print-directory all
	$(Q)$(BIN)/chanter launch examples/sample.yaml --overwrite

clean:
	$(Q)rm -rf build

-include $(patsubst %.o,%.d,$(OBJ)) $(wildcard $B/*/*.d $B/tests/*/*.d)
