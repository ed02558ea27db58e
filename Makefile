# Chanter's only build file. Everything it makes is under build/.
#
#   make            build/bin/chanter and the role programs beside it
#   make run        install what is missing, build, train on the bundled sample as processes
#   make test       install what is missing, build, run every test
#   make check      the tests alone          make deps    the packages alone
#   make bench-step a training step beside the machine's peak; ARGS="--quick" (docs/benchmarks.md)
#   make bench-peer Chanter beside PyTorch; ARGS="--quick" (docs/benchmarks.md)
#   make matrix     I1 over every combination of trainers, servers, lookahead, ...
#   make check-gpu  all tests and measurements that need a GPU; ARGS="--out FILE" (docs/testing.md)
#   make bugs       plant known bugs, one by one: the tests must find them
#   make SAN=address|undefined|thread check  the same under a sanitizer, in build/SAN/
#   make sanitize                            the tests where sanitizers have most to see
#   make BUG=name                            a build with a planted bug, in build/bug-name/
#   make CUDA=nvcc|none|emulated             GPUs: with nvcc, where it is found; not at all; or
#                                            CUDA on the CPU, in build/emulated/
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
JOBS := -j$(shell nproc)
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)

.PHONY: all deps run test check sanitize matrix check-gpu bugs bench-step bench-peer clean FORCE
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
# E: what is compiled for CUDA on the CPU; its tests are part of every flavour's.
CUDA_HOME ?= /usr/local/cuda
NVCC    := $(or $(shell command -v nvcc),$(wildcard $(CUDA_HOME)/bin/nvcc))
CUDA    ?= $(if $(NVCC),nvcc,none)
$(if $(filter nvcc none emulated,$(CUDA)),,$(error CUDA is nvcc, none or emulated, not $(CUDA)))
$(if $(filter nvcc,$(CUDA)$(NVCC)),$(error CUDA=nvcc: no nvcc in PATH or in $(CUDA_HOME)/bin))
E       := build/$(if $(SAN),$(SAN)-)emulated
O       := $(if $(filter emulated,$(CUDA)),$E,build/$(or $(SAN),release))
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
# -fno-math-errno: sqrtf becomes one instruction; no result changes. -Wno-psabi: how wide vectors are
# passed differs between machines; none is passed from one file to another.
CFLAGS_compute := -O3 -fno-math-errno -Wno-psabi -march=$(or $(MARCH),native)
# sm_80 (A100), sm_90a (H100, H200); newer ones compile the PTX when they load it. -fmad=false: as
# -ffp-contract=off. --ftz, --prec-*: IEEE, as they are by default.
NVCCFLAGS := -std=c++17 -O3 -fmad=false -lineinfo \
           -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90a,code=sm_90a \
           -gencode arch=compute_90,code=compute_90 -Xcompiler -fno-omit-frame-pointer \
           $(if $(CI),-Werror all-warnings)
CUDA_ROOT = $(patsubst %/bin/,%,$(dir $(realpath $(NVCC))))
CUDA_DEF_nvcc = -DCHANTER_CUDA -isystem $(CUDA_ROOT)/include
# Nothing but a GPU's use needs libcublasLt: it is loaded then, from where the toolkit is.
CUDA_LIB = $(firstword $(wildcard $(CUDA_ROOT)/lib64 $(CUDA_ROOT)/lib))
CUDA_LIB_nvcc = -L$(CUDA_LIB) -Wl,-rpath,$(CUDA_LIB) -lcudart_static -ldl -lrt -lstdc++
CUDA_DEF_emulated := -DCHANTER_CUDA -DCHANTER_CUDA_EMULATED
CUDA_DEF_none :=
CFLAGS_bench := $(CFLAGS_compute)
INC     := -I. -I$(GEN)
MPI_INC  = $(shell pkg-config --cflags ompi-c)
MPI_LIB  = $(shell pkg-config --libs ompi-c)
LDLIBS  := -lgrpc -lgpr -lprotobuf-c -lcyaml -lyaml -ljansson -lxxhash -lz -ldnnl -lgomp -lpthread -lm

# --- sources --------------------------------------------------------------------------------
FOLDERS := base config data proto compute oracle embserver trainer launch
CUDA_C  := $(wildcard compute/cuda*.c)
CUDA_CU := $(wildcard compute/*.cu)
# Kernels are named x.cu.o. cuda_blas.c is for the real library; the emulation has its own.
EMULATED := $(filter-out compute/cuda_blas.c,$(CUDA_C)) $(wildcard compute/emulated/*.c) $(CUDA_CU)
SRC_CUDA_nvcc := $(CUDA_C) $(CUDA_CU)
SRC_CUDA_emulated := $(EMULATED)
SRC     := $(filter-out %/main.c compute/cuda%.c,$(foreach d,$(FOLDERS),$(wildcard $d/*.c))) \
           $(SRC_CUDA_$(CUDA))
object   = $(patsubst %.cu,$1/%.cu.o,$(patsubst %.c,$1/%.o,$2))
PROTO   := $(wildcard proto/*.proto)
GENC    := $(patsubst proto/%.proto,$(GEN)/proto/%.pb-c.c,$(PROTO))
BUGGY   := $(if $(BUG),$(shell grep -lw BUG_$(BUG) $(SRC)))
$(if $(BUG),$(if $(BUGGY),,$(error there is no planted bug BUG_$(BUG))))
OBJ     := $(call object,$O,$(filter-out $(BUGGY),$(SRC))) $(call object,$B,$(BUGGY)) \
           $(patsubst $(GEN)/%.c,$O/gen/%.o,$(GENC))
PROGRAMS := $(BIN)/chanter $(BIN)/chanter-oracle $(BIN)/chanter-embserver $(BIN)/chanter-trainer
TESTS   := $(patsubst %.c,$B/%,$(wildcard tests/unit/test_*.c))
CUDA_TESTS := $(filter $B/tests/unit/test_cuda%,$(TESTS))
SUPPORT := $(patsubst %.c,$O/%.o,$(wildcard tests/support/*.c))
# Each call of the device table against the CPU: device_pair on this build's CUDA, emulated_pair on
# the emulated one, which make check runs.
PAIR    := $(patsubst %.c,%.o,$(wildcard tests/gpu/*.c))

all: $(PROGRAMS)

$(GEN)/proto/%.pb-c.c: proto/%.proto
	@mkdir -p $(GEN)
	$(Q)protoc-c --c_out=$(GEN) $<
GENH := $(GENC:.c=.h)
$(GENH): %.h: %.c ;

# Rebuild when the flags change. $(DEF): macros and paths of a flavour, for compute/ and its tests.
FLAGS = $(CC) $(CFLAGS) $(CFLAGS_compute) $(DEF)
NEWER = @mkdir -p $(@D); echo '$(FLAGS)' | cmp -s - $@ || echo '$(FLAGS)' > $@
$E/.flags: DEF = $(CUDA_DEF_emulated)
$O/compute/.flags: DEF = $(CUDA_DEF_$(CUDA)) $(if $(filter nvcc,$(CUDA)),$(NVCC) $(NVCCFLAGS))
$(sort $O/.flags $E/.flags $O/compute/.flags): FORCE ; $(NEWER)
$(filter $O/compute/%,$(OBJ)): $O/compute/.flags

COMPILE = @mkdir -p $(@D); $(if $(V),,echo "  CC $<";) \
    $(CC) $(CFLAGS) $(CFLAGS_$(firstword $(subst /, ,$<))) $(INC) $(EXTRA) -MMD -MP -c $< -o $@
$O/gen/%.o: $(GEN)/%.c $O/.flags | $(GENH) ; $(COMPILE)
# One rounding for a product and its sum where the machine can: see the file.
$O/compute/cpu_gemm.o: EXTRA = -ffp-contract=fast
$O/trainer/comm_mpi.o: EXTRA = $(MPI_INC)
$O/trainer/main.o: EXTRA = $(MPI_INC)
$O/%.o: %.c $O/.flags | $(GENH) ; $(COMPILE)
ifeq ($(CUDA),nvcc)
$O/%.cu.o: %.cu $O/.flags
	@mkdir -p $(@D); $(if $(V),,echo "  NVCC $<")
	$(Q)$(NVCC) $(NVCCFLAGS) -I. -MMD -MP -MF $(@:.o=.d) -c $< -o $@
endif
# For CUDA on the CPU: the same files with its macros, kernels as C.
ifneq ($O,$E)
$O/compute/%.o: EXTRA = $(CUDA_DEF_$(CUDA))
$E/%.o: %.c $E/.flags | $(GENH) ; $(COMPILE)
endif
$E/%.o: EXTRA = $(CUDA_DEF_emulated)
$E/%.cu.o: EXTRA = $(CUDA_DEF_emulated) -x c
$E/%.cu.o: %.cu $E/.flags ; $(COMPILE)
ifdef BUG
$B/%.o: EXTRA = -DBUG_$(BUG) -Wno-error
$B/%.o: %.c $O/.flags | $(GENH) ; $(COMPILE)
endif

$B/lib.a: $(OBJ)
	$(Q)rm -f $@; ar qcs $@ $^
# Before lib.a on the line of a link, this takes the place of its GPU.
$E/cuda.a: $(call object,$E,$(EMULATED) compute/device.c)
	$(Q)rm -f $@; ar qcs $@ $^

LINK = @mkdir -p $(@D); $(if $(V),,echo "  LD $@";) \
    $(CC) $(CFLAGS) $^ $(EXTRA_LIBS) $(LDLIBS) $(CUDA_LIB_$(CUDA)) -o $@
$(BIN)/chanter: $O/launch/main.o $B/lib.a ; $(LINK)
$(BIN)/chanter-oracle: $O/oracle/main.o $B/lib.a ; $(LINK)
$(BIN)/chanter-embserver: $O/embserver/main.o $B/lib.a ; $(LINK)
$(BIN)/chanter-trainer: EXTRA_LIBS = $(MPI_LIB)
$(BIN)/chanter-trainer: $O/trainer/main.o $B/lib.a ; $(LINK)
$(TESTS): EXTRA_LIBS = -lcmocka
$(filter-out $(CUDA_TESTS),$(TESTS)): $B/%: $O/%.o $(SUPPORT) $B/lib.a ; $(LINK)
$(CUDA_TESTS): $B/%: $E/%.o $(SUPPORT) $E/cuda.a $B/lib.a ; $(LINK)
$B/tests/gpu/%: EXTRA_LIBS = -lcmocka
$B/tests/gpu/device_pair: $(addprefix $O/,$(PAIR)) $(SUPPORT) $B/lib.a ; $(LINK)
$B/tests/gpu/emulated_pair: $(addprefix $E/,$(PAIR)) $(SUPPORT) $E/cuda.a $B/lib.a ; $(LINK)
.SECONDARY:

# --- tests ----------------------------------------------------------------------------------
check: $(TESTS) $(PROGRAMS) $B/tests/gpu/emulated_pair
	$(Q)$(if $(SAN)$(BUG)$(filter emulated,$(CUDA)),,$(MAKE) --no-print-directory CUDA=emulated all)
	$(Q)tests/run $B $(BIN)

# The whole matrix (I1); tests/run has the quick one.
matrix: all
	$(Q)tests/matrix --bin $(BIN)
# Building is not part of its 8 minutes.
check-gpu:
	$(Q)$(MAKE) --no-print-directory $(JOBS) CUDA=nvcc all $B/tests/gpu/device_pair $(BENCH_STEP)
	$(Q)tests/check_gpu --build $B $(ARGS)
# Every planted bug has to be found by the test that is there for it.
bugs:
	$(Q)tests/bugs

# Parsers and arrays under address and undefined, hand-overs between threads under thread.
SANITIZE := address:codec address:codec_plan address:cpu_interact address:criteo_tsv \
            address:prepared \
            address:safetensors address:config_bad address:store address:planner_limits \
            undefined:codec_plan undefined:cpu_sums undefined:group undefined:planner \
            thread:ring thread:lanes thread:comm thread:exchange thread:embserver thread:oracle
sanitize:
	$(Q)set -e; for pair in $(SANITIZE); do \
	    san=$${pair%%:*}; t=build/$$san/tests/unit/test_$${pair#*:}; \
	    $(MAKE) --no-print-directory $(JOBS) SAN=$$san $$t; echo "== $$t"; $$t; \
	done

# deps is a separate make, so that pkg-config and protoc-c are there when this file is read again.
test:
	$(Q)$(MAKE) --no-print-directory deps
	$(Q)$(MAKE) --no-print-directory $(JOBS) check
run:
	$(Q)$(MAKE) --no-print-directory deps
	$(Q)$(MAKE) --no-print-directory $(JOBS) all
	$(Q)$(BIN)/chanter launch examples/sample.yaml --overwrite

# --- a training step beside the machine's peak ----------------------------------------------
BENCH_STEP := $B/bench/bench_step
bench-step: $(BENCH_STEP)
	$(Q)$(BENCH_STEP) $(ARGS)
$(BENCH_STEP): $(patsubst %,$O/%.o,bench/bench_step bench/step_case bench/step_parts bench/peak \
    tests/support/reference_dlrm) $B/lib.a ; $(LINK)

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

-include $(patsubst %.o,%.d,$(OBJ)) $(wildcard $O/*/*.d $O/tests/*/*.d $E/*/*.d $E/*/*/*.d)
