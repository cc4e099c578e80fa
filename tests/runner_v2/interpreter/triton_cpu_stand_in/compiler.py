from triton.backends.compiler import BaseBackend


class Compiler(BaseBackend):
    @staticmethod
    def supports_target(target):
        return target.backend == "cpu"

    def hash(self):
        return "interpreter"

    def parse_options(self, options):
        raise NotImplementedError("nothing is compiled here: set TRITON_INTERPRET=1")

    def add_stages(self, stages, options, language=None):
        raise NotImplementedError

    def load_dialects(self, context):
        raise NotImplementedError

    def get_module_map(self):
        return {}
